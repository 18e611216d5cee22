"""What libraries that Transformers imports say on stderr by themselves: none of it is ours."""

import re

OF_TORCHAO = re.compile(
    r"Failed to load \S*/torchao/|W\d{4} .*torch/utils/_pytree\.py:\d+\] <enum '\w+'> is an Enum subclass"
)


def without_noise(text: str) -> str:
    """`text` without the lines of torchao, where it is installed."""
    return "".join(line for line in text.splitlines(keepends=True) if not OF_TORCHAO.match(line))
