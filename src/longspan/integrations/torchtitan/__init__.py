"""Training with torchtitan 0.3: the paper's language models, and larger ones, on many machines.

    torchrun --nproc-per-node 8 -m torchtitan.train \\
        --module longspan.integrations.torchtitan --config asentmax_nape_420m --hf_assets_path TOKENIZER

torchtitan reads `config_registry`; `model` has the modules, `weights` brings a trained model home.
"""
