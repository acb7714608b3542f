"""Composable PyTorch training of language models: one TOML, any layout, exact resume."""
