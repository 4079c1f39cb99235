"""A model's name -> checked files -> a GPT2."""
