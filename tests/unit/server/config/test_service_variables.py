"""A Service of Kubernetes named like this program is not taken for options."""

import pytest

from oarlock.server.config.options import OptionError
from oarlock.server.config.sources import load_settings, service_links


def links(service, address="10.96.0.7", port=8000):
    """Environment variables that a container gets for a Service with one named port."""
    name = service.upper().replace("-", "_")
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP": str(port),
        f"{name}_PORT": f"tcp://{address}:{port}",
        f"{name}_PORT_{port}_TCP": f"tcp://{address}:{port}",
        f"{name}_PORT_{port}_TCP_PROTO": "tcp",
        f"{name}_PORT_{port}_TCP_PORT": str(port),
        f"{name}_PORT_{port}_TCP_ADDR": address,
    }


@pytest.mark.parametrize("service", ["oarlock", "oarlock-master", "oarlock-large-model", "kubernetes"])
def test_links_are_not_options(service):
    environment = links(service) | links("kubernetes")
    assert service_links(environment) == set(environment)
    loaded = load_settings({}, environment)
    assert (loaded.settings.port, loaded.origins["port"]) == (8000, "default")


def test_a_port_of_ones_own_beside_links_counts():
    environment = links("oarlock") | {"OARLOCK_PORT": "8123", "OARLOCK_DEVICE": "cpu"}
    settings = load_settings({}, environment).settings
    assert (settings.port, settings.device) == (8123, "cpu")


@pytest.mark.parametrize(
    "environment",
    [{"OARLOCK_PORT": "tcp://10.96.0.7:8000"}, links("oarlock") | {"OARLOCK_PROT": "1"}, {"OARLOCK_SERVICE_PORT": "1"}],
)
def test_variables_that_are_no_service_links_are_checked_as_usual(environment):
    with pytest.raises(OptionError):
        load_settings({}, environment)
