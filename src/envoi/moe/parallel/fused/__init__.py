"""Fused L1 over NVLink: the experts' first GEMM pulls its tokens from peers itself, while it multiplies.

    order_rows   which token each row has; counters to 0     `order_kernels`, a launch after dispatch's send_routing
    fused L1     pull, L1, activation, quantise              `kernel`, a launch in place of pull_rows and L1

The first may start before send_routing ends, and waits for its end. The second may start as soon as that has ended: it
sets up barriers and loads weights; producers and movers wait for the end of the first.

The bits are those of the staged path: rows have the same places and contents, and tiles the same order of sums.

Roles of a CTA: those of `envoi.gemm.hopper.kernel`, and movers. With two consumers:

    role         warps   registers   work
    consumer     2 x 4   232         mainloop and epilogue
    producer     1       40          TMA loads: weights at once, tokens once their rows have arrived
    mover        2 or 3  40, a role  peers' tokens -> rows, by 16-byte loads and stores

    time ------------------------------------------------------------------------------------------------------>
    all warps    weights of all stages (prefill)
    movers                      ticket  look up  loads of token t   loads of t'   | stores of t'  ..
                                                         | stores of t | t counted
    producer                    waits for the rows of tile 0 ............. acquire  tokens of all stages  step by step
    consumer                    waits for `rows` ............................... factors  waits for `full`  wgmma, ..

Consumers read tokens' scale factors by plain loads. They wait for `rows` of a unit before: the producer arrives on it
after it has acquired the rows' arrival, so that whoever has waited for it sees what the producer saw. It is usually a
unit ahead, and they then request factors at once, as in the staged L1.

    counter, in global memory    adds                      waits                              resets to 0
    tickets                      a mover, a batch          nobody                             order_rows, before L1
    arrivals [block of 64 rows]  a mover, a row: release,  producers: all rows of the tile's  order_rows, before L1
                                 GPU scope                 blocks; acquire, then a fence to
                                                           the async proxy, as TMA reads

    barrier, in shared memory    arrivals                                    waits
    rows [ring of num_stages]    1: the producer, a unit, after its arrival  consumers, once a unit
    full                         1: the producer, after the rows' arrival    consumers
    empty                        each consumer                               producer

Weights of a stage may be there before the producer arrives on `full`; the phase ends when it has and all bytes came.

A mover waits for nobody: a peer's tokens have been complete since dispatch. Tickets go in order to movers that run, so
rows come even if some CTAs don't start until others have ended. A producer's wait is bounded all the same: after
timeout_s it reports its own rank, the call's outcome is LOST, it waits for no row any more, and the output is NaN.

Nothing outlives a launch but the rows: a CUDA graph replays both launches. A peer may overwrite its tokens only after
this rank's flag of combine, which follows L1 in its stream.
"""
