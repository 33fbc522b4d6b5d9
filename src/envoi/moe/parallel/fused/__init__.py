"""Experts in one launch over NVLink: pull, L1, activation, quantise, L2 and the way back.

    dispatch     tokens and routing to where peers read them                `dispatch`, without its pull
    fused        peers' tokens -> rows -> L1 -> hidden rows -> L2 -> rows to their ranks             `kernel`
    combine      wait for the peers' rows, sum them                         `combine`

It takes the place of three launches of the staged path, with the same bits: rows have the same places and contents, and
tiles the same order of sums.

Roles of a CTA: those of `envoi.gemm.hopper.kernel`. All go through the same three phases:

    role       warps   registers   pull                      L1                     L2
    consumer   2 x 4   240         peers' tokens -> rows     mainloop, epilogue     mainloop, epilogue
    producer   1       24          waits for all rows        TMA loads              waits for hidden rows, TMA loads

    8 units of L1, each as long as 2 tiles of L2, on 6 CTAs

    CTA 0   pull   L1: 0            L1: 6            L2: 8      L2: 14
    CTA 1   pull   L1: 1            L1: 7            L2: 9      L2: 15
    CTA 2   pull   L1: 2            L2: 0   L2: 4    L2: 10     L2: 16
    ..
    CTA 5   pull   L1: 5            L2: 3   L2: 7    L2: 13

A CTA that L1's last round has no unit for goes on with L2's tiles of the first experts, whose hidden rows are complete
once all other rounds are (`scheduler`). Stages of both GEMMs have one shape, and one ring goes on from L1's last step
to L2's first. With few rows an expert L1 has one consumer, and L2 two that take tiles in turns.

    counter, in global memory   adds                                        waits                            to 0
    pulled                      a consumer, its share of the tokens         all roles, before L1             the last
    last round                  a consumer, before its unit of that round   producers, before L2             producer
    ended                       a consumer, all its units of L1             producers, before tiles of the   that has
                                                                            last round's experts, or at the  waited
                                                                            end
    waited                      a producer                                  nobody

    barrier, in shared memory   arrivals                                    waits
    rows [ring of num_stages]   1: the producer, a tile of L2               consumers, before they read factors

An addition releases at GPU scope what all warps of the consumer have written; a wait acquires it, and orders it before
TMA loads by a fence to the async proxy. Consumers read the factors of hidden rows by plain loads, after `rows`.

All CTAs run at once or none (a cooperative launch), so none waits for one that can't start; and none waits for a peer,
whose tokens have been complete since dispatch. Nothing outlives a launch: a CUDA graph replays it.
"""
