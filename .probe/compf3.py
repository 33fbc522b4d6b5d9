import sys; sys.path.insert(0,'.probe')
import torch, ep2
from envoi.runtime.devices import Target
from envoi.runtime.rehearsal import rehearse
from envoi.runtime import triton_compat
from envoi.moe.warm_up import LayerCall
for (H,I,E,k,M) in ((4096,2048,32,6,2048),(4096,2048,32,6,8192),(2048,768,128,8,512),(2048,768,128,8,4096),(4096,2048,32,6,256),(7168,2048,32,8,4096),(2048,768,128,8,64)):
    call=LayerCall(ep2.experts(H,I,E),k)
    names=[]
    for kernel,grid,args,opts in rehearse(call,M,Target("sm_90",132)):
        n=kernel.fn.__name__
        names.append(n)
        if n=="fused_kernel":
            made=triton_compat.compile_like_a_launch(kernel,args,"sm_90",opts)
            from envoi.gemm.hopper.config import Config
            names.append(([a.label() for a in args if isinstance(a,Config)], made.metadata.shared, opts))
    print(H,I,E,k,M,"rows/e",M*k//E,names,flush=True)
