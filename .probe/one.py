"""Experiment: one GPU, envoi.moe fp8_block128 with L1 and L2 in one launch beside two, in turns; cold L2, graphs of one call."""
import os, json, statistics, sys, time
from functools import partial
import torch
from envoi.bench.shapes import MoeShape
from envoi.bench.suites.moe import make_layer, make_routing
from envoi.bench.timing import Clock
from envoi.moe import moe
from envoi.moe.one_launch.host import use_one_launch, takes_one_launch
from envoi.moe.one_launch import host
from envoi.moe.warm_up import LayerCall, without_tensors
from envoi.runtime.compilers import Compilers
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import compile_at, find
CASES = [(4096, 2048, 32, 6, m) for m in (256, 341, 512, 1024, 2048, 8192)] + [(2048, 768, 128, 8, m) for m in (256, 512, 1024, 2048, 8192)] + [(7168, 2048, 32, 8, m) for m in (1024, 4096)] + [(4096, 2048, 128, 6, m) for m in (512, 2048, 4096)] + [(5120, 1536, 32, 4, m) for m in (500, 3000)]
def forced_at(calls, target, wanted, job):
    use_one_launch(wanted); return compile_at(calls, target, True, job)
def precompile(target):
    import ep2
    t0, total = time.time(), 0
    calls = [LayerCall(ep2.experts(H, I, E), k) for H, I, E, k, M in CASES]
    with Compilers(target, os.cpu_count() - 1) as comp:
        for wanted in (False, True):
            use_one_launch(wanted); jobs = {}
            for n, case in enumerate(CASES):
                for d, site in find([calls[n]], target, [case[-1]]).items(): jobs.setdefault(d, site._replace(call=n))
            total += len(jobs)
            for job, error in comp.map(partial(forced_at, calls, target, wanted), list(jobs.values())):
                if error: print("COMPILE", job, error, flush=True)
    use_one_launch(None)
    print(f"[{time.time()-t0:.0f} s] {total} compiled", flush=True)
def main():
    t0, dev = time.time(), torch.device("cuda", 0)
    precompile(Target.of(dev))
    clock, rows, last = Clock(dev, int(os.environ.get("REPEAT", "25"))), [], None
    for H, I, E, k, M in CASES:
        if last != (H, I, E, k):
            layer = None; torch.cuda.empty_cache()
            layer = make_layer(MoeShape(H, I, E, k, max(c[-1] for c in CASES if c[:4] == (H, I, E, k)), "fp8_block128"), dev, 0, 1); last = (H, I, E, k)
        for zipf in (0.0, 1.2):
            shape = MoeShape(H, I, E, k, M, "fp8_block128", zipf=zipf)
            x, routing = layer.tokens[:M].contiguous(), make_routing(shape, torch.Generator(dev).manual_seed(M))
            runs, outs = {}, {}
            for wanted in (False, True):
                use_one_launch(wanted)
                outs[wanted] = moe(x, routing, layer.packed).clone(); moe(x, routing, layer.packed)
                g = torch.cuda.CUDAGraph(); torch.cuda.synchronize()
                with torch.cuda.graph(g): out = moe(x, routing, layer.packed)
                runs[wanted] = (g, out)
            use_one_launch(None)
            found = clock.rounds({w: runs[w][0].replay for w in runs})
            two, one = found[False].p50_us, found[True].p50_us
            rows.append((H, I, E, k, M, zipf, two, one))
            print(f"{H}/{I}/{E}/{k} M={M:5} zipf {zipf} rows/e {M*k//E:5} two {two:8.1f} one {one:8.1f} {one/two:.3f} {'same' if torch.equal(outs[False], outs[True]) else 'DIFFERENT'} [{time.time()-t0:.0f} s]", flush=True)
    json.dump(rows, open("/tmp/o/one.json", "w"))
