"""The code that an export carries: two files that import torch and transformers and nothing of ours."""
