"""Text and source files -> Megatron indexed datasets: python -m nam_megatron.data {corpus, tokenizer, build, check}.

A built dataset is a folder: `train` and `valid` (.bin, .idx), `tokenizer/`, and `manifest.json`, which says what it was made of. The
recipe group `data=built` points to one, and the trainer refuses it where the manifest does not fit the recipe.
"""
