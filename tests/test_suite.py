"""What holds of the suite itself, wherever it runs."""

import os
import warnings


def test_advice_for_cuda_is_no_error() -> None:
    """Inductor's words, in every unit with a product in float32 where there are tensor cores."""
    warnings.warn(
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
        "Consider setting `torch.set_float32_matmul_precision('high')` for better performance.",
        UserWarning,
        stacklevel=1,
    )


def test_no_test_but_those_marked_so_sees_a_cuda_device() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
