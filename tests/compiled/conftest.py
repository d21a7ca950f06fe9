"""Every test of this folder begins with a compiler that knows nothing."""

from tests.compiler import fresh_compiler as fresh_compiler
from tests.compiler import kernel_folder as kernel_folder
