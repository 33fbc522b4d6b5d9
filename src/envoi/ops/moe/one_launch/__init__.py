"""Experts in one launch: L1, activation, quantise, L2.

    rows -> L1 -> hidden rows -> L2 -> rows, or over NVLink rows to their ranks

It has the bits of the launches that it replaces: rows have the same places and contents, and tiles the same order of
sums.

Roles of a CTA: those of `envoi.ops.gemm.hopper.kernel`, and a signaler. All go through the same phases:

    role       warps   registers   L1                     L2
    consumer   2 x 4   240         mainloop, epilogue     mainloop, epilogue
    producer   1       24          TMA loads              waits for hidden rows, TMA loads
    signaler   1       24          counts units

    8 units of L1, each as long as 2 tiles of L2, on 6 CTAs

    CTA 0   L1: 0            L1: 6            L2: 8      L2: 14
    CTA 1   L1: 1            L1: 7            L2: 9      L2: 15
    CTA 2   L1: 2            L2: 0   L2: 4    L2: 10     L2: 16
    ..
    CTA 5   L1: 5            L2: 3   L2: 7    L2: 13

Producers take L1's units, pairs of tiles, one by one, then L2's tiles (`scheduler`), each once the last one's loads
are issued: so all CTAs end within a tile of each other. In both orders experts with many rows and with few have turns
(`envoi.ops.gemm.hopper.mixed_experts`). Producers publish each tile's corner, so that only producers search for its
expert; one whose share of a tile has no rows leaves the tensor cores to others. A producer comes to L2 once all units
are taken, by CTAs that run. Its tile waits for the units that write its expert's hidden rows, those before them, and
the others of their last counter. Stages of both GEMMs have one shape, and one ring goes on from L1's last step to L2's
first. With few rows an expert L1 has one consumer, and L2 two that have tiles in turns.

    counter, in global memory   adds                                  waits                              to 0
    WRITTEN [units >> shift]    a CTA, for each unit: hidden rows     producers, before a tile of L2     the last
                                of it are written                                                        producer that
                                                                                                         leaves
    TAKEN, TAKEN_IN_L2          a producer, for each unit or tile     nobody
    LEFT                        a producer: it waits for no more      nobody

    barrier, in shared memory   arrivals                              waits
    written, full [ring of 4]   consumers, each unit and the end      the signaler, before it adds to WRITTEN
    written, empty [ring of 4]  1: the signaler, each unit and end    consumers, before they arrive on `full` again
    tiles, full [stages + 1]    1: the producer, each tile and end    consumers, before they read its corner
    ended                       1: the producer, after L1's tiles     a consumer that has none of them

An addition to WRITTEN releases at GPU scope what the consumers had written when they arrived; a wait acquires
it, and orders it before TMA loads by a fence to the async proxy. While memory is busy a release takes as long as a load
does, microseconds; the signaler waits for it, and consumers go on. They read the factors of hidden rows by plain loads,
after the tile's `full`.

A CTA waits only for units that a running one has taken: CTAs may start when others have ended, next to whatever else
the GPU runs. Nothing outlives a launch: a CUDA graph replays it.
"""
