# On branch `evict`, one GPU: a graph of six layers with and without evict-first on weights, two turns each. ~150 s.
source .probe/env.sh
export PYTHONPATH=$PYTHONPATH:.probe
nvidia-smi --query-gpu=name --format=csv,noheader
for TURN in 0 1; do for E in 0 1; do export TURN ENVOI_EVICT=$E TRITON_CACHE_DIR=/tmp/tc$E; timeout 75 python3 -W ignore .probe/evict.py > /tmp/evict_${E}_$TURN.txt 2>&1; tail -1 /tmp/evict_${E}_$TURN.txt; mark evict $E turn $TURN; done; done
python3 - <<'P'
import json, glob
def of(e): return [json.load(open(f)) for f in sorted(glob.glob(f"/tmp/evict_{e}_*.json"))]
a, b = of(0), of(1)
for case in a[0]:
    print(f"{case:40} as it is {[round(x[case], 1) for x in a]} evict first {[round(x[case], 1) for x in b]} ratio {sum(x[case] for x in b) / len(b) / (sum(x[case] for x in a) / len(a)):.3f}")
P
tar czf $OUT/all.tgz -C /tmp $(cd /tmp; ls evict_*)
