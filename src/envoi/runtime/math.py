"""Small functions of the host."""


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up, for b > 0."""
    return -(-a // b)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 1."""
    return 1 << max(0, size - 1).bit_length()


def mean_chosen(num_choices: int, num_draws: int) -> float:
    """Return how many of the choices are drawn at least once, in the mean over draws at random."""
    return num_choices * (1 - (1 - 1 / num_choices) ** num_draws)
