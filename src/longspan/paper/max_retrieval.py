"""The paper's table of Max Retrieval: accuracy in percent by number of items, trained on at most 16."""

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def _row(*accuracies: float) -> dict[int, float]:
    return dict(zip(LENGTHS, accuracies, strict=True))


ACCURACY: dict[str, dict[int, float]] = {
    "softmax (Velickovic et al.)": _row(98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6),
    "adaptive temperature": _row(98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9),
    "softmax": _row(99.2, 98.5, 96.7, 93.2, 86.7, 73.5, 54.4, 36.4, 24.1),
    "softmax, temperature 0.1": _row(99.5, 99.0, 97.8, 95.1, 89.6, 77.9, 60.2, 41.2, 28.5),
    "softmax, temperature 0.0004": _row(99.2, 98.4, 97.0, 94.2, 89.4, 81.8, 71.4, 58.4, 43.4),
    "ssmax": _row(99.4, 98.9, 97.8, 95.9, 92.3, 85.0, 74.7, 59.9, 44.7),
    "top-2": _row(99.4, 98.6, 97.6, 95.4, 91.3, 85.0, 75.3, 62.4, 48.3),
    "top-4": _row(98.8, 97.7, 95.0, 89.5, 79.1, 64.6, 48.9, 38.9, 32.4),
    "entmax 1.5": _row(99.4, 98.8, 97.4, 94.7, 89.9, 80.1, 65.1, 50.0, 36.8),
    "entmax 2": _row(99.5, 99.1, 98.0, 96.0, 92.1, 84.5, 72.0, 58.4, 44.6),
    "entmax 4": _row(99.5, 98.9, 97.7, 95.9, 92.1, 84.8, 75.2, 61.4, 46.9),
    "entmax 16": _row(99.6, 99.4, 98.7, 97.5, 95.2, 91.0, 82.8, 70.3, 53.4),
    "entmax 32": _row(99.4, 98.7, 97.5, 95.5, 91.5, 83.8, 72.6, 57.5, 41.7),
    "entmax 64": _row(99.1, 98.4, 96.8, 93.9, 88.7, 78.6, 64.6, 45.5, 28.1),
    "asentmax, gamma 1": _row(99.5, 99.0, 98.1, 96.3, 93.1, 86.1, 76.2, 61.9, 44.5),
    "asentmax, gamma 2": _row(99.6, 99.2, 98.4, 96.9, 94.4, 89.0, 81.4, 69.5, 55.1),
    "asentmax, gamma 3": _row(99.6, 99.4, 99.0, 98.0, 96.0, 92.4, 85.9, 76.1, 62.7),
    "asentmax, gamma 4": _row(99.3, 98.7, 97.6, 95.4, 91.3, 84.6, 73.6, 59.7, 45.9),
}

# The demo's methods, from the most dispersed to the least, and the paper's row for each.
DEMO_ROWS = {
    "softmax": "softmax",
    "adaptive temperature": "adaptive temperature",
    "entmax 1.5": "entmax 1.5",
    "ssmax": "ssmax",
    "top-2": "top-2",
    "asentmax": "asentmax, gamma 3",
}


def paper_row(method: str) -> str:
    """The paper's row for a method of the demo, or for one that bears the row's name."""
    return DEMO_ROWS.get(method, method)
