"""Formats and patterns of JSON schemas that clients send and llguidance lacks, with their expressions.

The formats are from pydantic, zod and OpenAPI. Expressions may allow fewer texts than the format, never others: for
example, an address has only one of its spellings.
"""

# Formats that only describe display or storage: they exclude no value.
ANNOTATION_FORMATS = frozenset(
    (
        *("password", "binary", "byte", "path", "file-path", "directory-path"),
        *("string", "text", "textarea", "markdown", "html", "color"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double"),
    )
)

_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_IPV6 = "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}"
_BITS4, _BITS6 = "(3[0-2]|[12]?[0-9])", "(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_NETWORK4 = rf"({_OCTET}\.0\.0\.0/8|{_OCTET}\.{_OCTET}\.0\.0/16|({_OCTET}\.){{3}}0/24|{_IPV4}/32)"
_GROUP6 = "[0-9a-fA-F]{1,4}"
_NETWORK6 = f"(({_GROUP6}:){{2}}:/32|({_GROUP6}:){{3}}:/48|({_GROUP6}:){{4}}:/64|{_IPV6}/128)"


def _uuid(version: str) -> str:
    return f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}"


PATTERNS = {
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "ipvanyaddress": _IPV4,
    "ipv4network": _NETWORK4,
    "ipv6network": _NETWORK6,
    "ipvanynetwork": _NETWORK4,
    "ipv4interface": f"{_IPV4}/{_BITS4}",
    "ipv6interface": f"{_IPV6}/{_BITS6}",
    "ipvanyinterface": f"{_IPV4}/{_BITS4}",
    "cidrv4": f"{_IPV4}/{_BITS4}",
    "cidrv6": f"{_IPV6}/{_BITS6}",
    "base64": "([0-9a-zA-Z+/]{4})*([0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?",
    "base64url": "([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2,3})?",
    "jwt": r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*",
    "nanoid": "[a-zA-Z0-9_-]{21}",
    "cuid": "c[0-9a-z]{24}",
    "cuid2": "[a-z][0-9a-z]{23}",
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
    "xid": "[0-9a-v]{20}",
    "ksuid": "[A-Za-z0-9]{27}",
    "e164": r"\+[1-9][0-9]{6,14}",
}

_DATE = (
    "[12][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"  # no leap days
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
# Formats of property names. The library knows them only as formats of strings.
NAME_FORMATS = {
    **PATTERNS,
    "uuid": _uuid("[1-8]"),
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}Z",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
}

# Patterns of zod with negative look-ahead -> an expression without it that matches the same texts, or fewer.
WITHOUT_LOOK_AROUND = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M)?(\d+(\.\d+)?S)?|\d+M(\d+(\.\d+)?S)?|\d+(\.\d+)?S))?"
        r"|T(\d+H(\d+M)?(\d+(\.\d+)?S)?|\d+M(\d+(\.\d+)?S)?|\d+(\.\d+)?S))$"
    ),
}
