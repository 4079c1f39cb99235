"""GPT-2 as torch modules. Start with model.py."""
