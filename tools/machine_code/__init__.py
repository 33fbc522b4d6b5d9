"""Machine code of kernels without a GPU: compile for an architecture, disassemble, count, compare.

    recipe (registry) -> compile -> Binary -> disassemble -> count -> Record -> report, diff

`python -m tools.machine_code` is the command; `compile.compile_kernel` and `record.of_binary` are what tests use.
"""
