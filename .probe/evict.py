"""Experiment: weights' TMA loads with evict-first; a graph of 6 layers with weights of their own, nothing flushed."""
import os, sys, time, json, statistics
import torch, envoi
from envoi.runtime import cache_hints
L = 6
def layer_of(H, I, E, k, fmt, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    gu = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16, generator=g) / H**.5
    dn = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16, generator=g) / I**.5
    ex = envoi.experts.pack(gu, dn, fmt); del gu, dn
    return ex
def main():
    out = {}
    for H, I, E, k, fmt in ((2048, 768, 128, 8, "fp8_block128"), (2048, 768, 128, 8, "bf16"), (4096, 2048, 32, 6, "fp8_block128")):
        layers = [layer_of(H, I, E, k, fmt, s) for s in range(L)]
        gate = torch.randn(E, H, device="cuda", dtype=torch.bfloat16)
        for M in (1, 16, 64, 512, 4096):
            x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16)
            def step():
                y = x
                for ex in layers:
                    y = torch.nn.functional.rms_norm(y + envoi.moe(y, envoi.route(y, gate, k=k), ex), (H,))
                return y
            for _ in range(3): step()
            g = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(g): y = step()
            for _ in range(3): g.replay()
            ts = []
            for _ in range(40):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / L)
            out[f"{H}/{I}/{E}/{k} {fmt} {M}"] = statistics.median(ts)
            print(f"evict {os.environ.get('ENVOI_EVICT', '0')} {H}/{I}/{E}/{k} {fmt} M={M} {statistics.median(ts):.2f} us a layer, sum {float(y.float().sum()):.3f}", flush=True)
        del layers; torch.cuda.empty_cache()
    json.dump(out, open(f"/tmp/evict_{os.environ.get('ENVOI_EVICT', '0')}_{os.environ.get('TURN', '0')}.json", "w"))
if __name__ == "__main__": main()
