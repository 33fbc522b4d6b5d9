"""GEMMs on Blackwell (sm_100, sm_103): TMA, tcgen05, tensor memory. Compiled and counted, never run yet."""
