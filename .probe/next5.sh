# On branch `experts-one-launch`, one GPU: bits, then two launches beside one. ~250 s.
source .probe/env.sh
export PYTHONPATH=$PYTHONPATH:.probe
O=/tmp/o; mkdir -p $O
nvidia-smi --query-gpu=name --format=csv,noheader
timeout 150 python3 -m pytest tests/moe/test_one_launch_gpu.py -m gpu -n 6 -v --durations=6 --timeout 60 -p no:cacheprovider > $O/tests.txt 2>&1
grep -E "FAILED|ERROR|passed|failed|^E  |Timeout" $O/tests.txt | cut -c1-300 | tail -30
mark tests
timeout 240 python3 -W ignore -c "import one; one.main()" 2>&1 | tee $O/one.txt | grep "rows/e\|COMPILE\|Error"
mark one
tar czf $OUT/all.tgz -C /tmp o
