"""Published config.json files as this transformers writes them: JSON of name and keys in, the files in the folder OUT."""

import json
import sys
from pathlib import Path

from transformers import AutoConfig

for name, keys in json.load(sys.stdin).items():
    AutoConfig.for_model(**keys).save_pretrained(Path(sys.argv[1]) / name)
