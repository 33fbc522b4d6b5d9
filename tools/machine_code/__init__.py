"""Machine code of Envoi's kernels without a GPU: compile for an architecture, disassemble, count, hold to rules.

    tools.kernel_cases -> compile -> Binary -> disassemble -> count -> Record -> gate

`python -m tools.machine_code --help` lists the commands.
"""
