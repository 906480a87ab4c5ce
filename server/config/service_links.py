"""The variables that Kubernetes sets in every container for each Service of its namespace ("service links").

For a Service `oarlock` they are named like ours: OARLOCK_SERVICE_HOST, OARLOCK_PORT=tcp://10.96.0.7:8000 and so on
(Kubernetes, "Accessing the Service", environment variables). They say nothing that the server needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_HOST = "_SERVICE_HOST"
_PORT = "_PORT"
_OTHERS = r"_SERVICE_PORT(_\w+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
_ADDRESS = re.compile("(tcp|udp|sctp)://")


def service_links(environment: Mapping[str, str]) -> set[str]:
    """The names of these variables. OARLOCK_PORT is one only where its value is: `tcp://…`, not a number."""
    services = [name.removesuffix(_HOST) for name in environment if name.endswith(_HOST)]
    others = re.compile(f"({'|'.join(map(re.escape, services))})({_OTHERS})")
    found = {name for name in environment if services and others.fullmatch(name)}
    found |= {service + _HOST for service in services}
    return found | {service + _PORT for service in services if _ADDRESS.match(environment.get(service + _PORT, ""))}
