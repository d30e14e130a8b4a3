"""The paper's tables as data. "Long-Context Generalization with Sparse Attention", Vasylenko et al., ICLR 2026."""
