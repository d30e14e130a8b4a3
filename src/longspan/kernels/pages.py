"""The unit in which caches are read, summarised and skipped; known without Triton."""

PAGE = 64  # keys
MOST_QUERIES = 16  # of one sequence that decoding takes at once
MANY_KEYS = 1 << 10  # from here on a row is shared out among programs
EPSILON = 2.0**-10  # what rounding may add to a bound or a score, of |q| |k|: over 30 times what float32 sums of 256 do
