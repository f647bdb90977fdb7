import gc

import pytest

from nanovllm.utils.collector import collector_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_collector_is_as_before_whatever_happened(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(KeyError), collector_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        gc.enable() if before else gc.disable()
