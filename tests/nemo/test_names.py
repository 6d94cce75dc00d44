"""The names of NeMo's recipe functions, which need no Bridge."""

from nam_megatron import nemo


def test_a_name_says_the_precision():
    names = nemo.names()
    assert names["nam56r_pretrain_8gpu_h200_bf16_config"] == names["nam56r_pretrain_config"] == "nam56r"
    assert names["nam56r_native_dp_fp8_pretrain_8gpu_h200_fp8_config"] == "nam56r_native_dp_fp8"
