"""What tests/conftest.py does around each of its tests is done around these as well."""

from tests.conftest import _fresh, pytest_configure, pytest_ignore_collect

__all__ = ["_fresh", "pytest_configure", "pytest_ignore_collect"]
