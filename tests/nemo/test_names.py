"""The names of NeMo's recipe functions, which need no Bridge."""

from nam_megatron import nemo
from nam_megatron.recipe import conf_dir


def test_a_name_says_the_precision():
    names = nemo.names()
    assert len(names) == 3 * len(list((conf_dir() / "preset").glob("*.yaml"))) and names.keys() <= set(dir(nemo))
    assert names["nam56r_pretrain_8gpu_h200_bf16_config"] == names["nam56r_pretrain_config"] == "nam56r"
    assert names["nam56r_native_dp_fp8_pretrain_8gpu_h200_fp8cs_config"] == "nam56r_native_dp_fp8"
