"""What tests of measurements share. Some have targets of their own."""

import pytest

import tiny


@pytest.fixture(scope="module")
def target():
    return tiny.target("llama")


@pytest.fixture(scope="module")
def drafter(target):
    return tiny.eagle(target)
