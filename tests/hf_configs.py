"""config.json of the public models that have presets, as `hf_configs.yaml` has them."""

from pathlib import Path
from typing import Any

import yaml

SAID = yaml.safe_load(Path(__file__).with_name("hf_configs.yaml").read_text())


def _whole(name: str) -> dict[str, Any]:
    said = SAID[name]
    return {**(_whole(said["like"]) if "like" in said else {}), **said["config"]}


CONFIGS = {name: _whole(name) for name in SAID}
LLAMA, DEEPSEEK_V2_LITE, DEEPSEEK_V3 = (CONFIGS[n] for n in ("llama_3_1_8b", "deepseek_v2_lite", "deepseek_v3_yarn"))
NEMOTRON_3_NANO, GLM_4_7_FLASH, GPT_OSS = (
    CONFIGS[n] for n in ("nemotron_3_nano_30b_a3b", "glm_4_7_flash", "gpt_oss_20b")
)
