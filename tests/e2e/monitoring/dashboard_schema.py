"""JSON schema of Grafana's classic dashboard model, for the parts that are used here.

Written after Grafana's description of the model: unknown keys are refused, so a misspelt one does not pass.
"""

from __future__ import annotations

from typing import Any


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT, _FLAG, _NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
_TEXTS = {"type": "array", "items": _TEXT}
_SOURCE = _object({"type": {"const": "prometheus"}, "uid": {"const": "oarlock-prometheus"}})
_PLACE = _object(
    {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    }
)
_TARGET = _object(
    {
        "datasource": _SOURCE,
        "expr": {"type": "string", "minLength": 1},
        "refId": {"type": "string", "pattern": "^[A-Z]$"},
    },
    legendFormat=_TEXT,
    editorMode={"enum": ["code", "builder"]},
    range=_FLAG,
)
_STEP = _object({"color": _TEXT, "value": {"type": ["number", "null"]}})
_CUSTOM = _object(
    {},
    drawStyle={"enum": ["line", "bars", "points"]},
    lineWidth={"type": "integer", "minimum": 0, "maximum": 10},
    fillOpacity={"type": "integer", "minimum": 0, "maximum": 100},
    showPoints={"enum": ["auto", "never", "always"]},
    stacking=_object({"mode": {"enum": ["none", "normal", "percent"]}, "group": _TEXT}),
)
# Grafana's ids of units that are used here.
_UNITS = {"enum": ["short", "s", "percentunit", "reqps", "ops"]}
_DEFAULTS = _object(
    {"unit": _UNITS, "color": _object({"mode": {"enum": ["thresholds", "palette-classic"]}})},
    min=_NUMBER,
    max=_NUMBER,
    decimals={"type": "integer"},
    thresholds=_object({"mode": {"enum": ["absolute", "percentage"]}, "steps": {"type": "array", "items": _STEP}}),
    custom=_CUSTOM,
)
_FIELDS = _object({"defaults": _DEFAULTS, "overrides": {"type": "array", "maxItems": 0}})
_STAT_OPTIONS = _object(
    {
        "reduceOptions": _object({"calcs": _TEXTS, "fields": _TEXT, "values": _FLAG}),
        "colorMode": {"enum": ["none", "value", "background"]},
        "graphMode": {"enum": ["none", "area"]},
        "justifyMode": {"enum": ["auto", "center"]},
        "orientation": {"enum": ["auto", "horizontal", "vertical"]},
        "textMode": {"enum": ["auto", "value", "name", "value_and_name", "none"]},
    }
)
_SERIES_OPTIONS = _object(
    {
        "legend": _object(
            {
                "displayMode": {"enum": ["list", "table", "hidden"]},
                "placement": {"enum": ["bottom", "right"]},
                "showLegend": _FLAG,
                "calcs": _TEXTS,
            }
        ),
        "tooltip": _object({"mode": {"enum": ["single", "multi", "none"]}, "sort": {"enum": ["none", "asc", "desc"]}}),
    }
)


def _panel(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "type": {"const": kind},
            "id": {"type": "integer", "minimum": 1},
            "title": {"type": "string", "minLength": 1},
            "datasource": _SOURCE,
            "gridPos": _PLACE,
            "targets": {"type": "array", "items": _TARGET, "minItems": 1},
            "fieldConfig": _FIELDS,
            "options": options,
        },
        description=_TEXT,
    )


_ROW = _object(
    {
        "type": {"const": "row"},
        "id": {"type": "integer", "minimum": 1},
        "title": _TEXT,
        "collapsed": {"const": False},
        "panels": {"type": "array", "maxItems": 0},
        "gridPos": _PLACE,
    }
)
_VARIABLE = _object(
    {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "label": _TEXT,
        "type": {"const": "query"},
        "datasource": _SOURCE,
        "query": _object({"query": _TEXT, "refId": _TEXT}),
        "definition": _TEXT,
        "refresh": {"enum": [0, 1, 2]},
        "sort": {"type": "integer", "minimum": 0, "maximum": 8},
        "multi": _FLAG,
        "includeAll": _FLAG,
        "allValue": _TEXT,
        "current": _object({"selected": _FLAG, "text": _TEXTS, "value": _TEXTS}),
        "options": {"type": "array"},
        "regex": _TEXT,
        "hide": {"enum": [0, 1, 2]},
        "skipUrlSync": _FLAG,
    }
)
SCHEMA = _object(
    {
        "title": {"type": "string", "minLength": 1},
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "tags": _TEXTS,
        "schemaVersion": {"type": "integer", "minimum": 36},
        "version": {"type": "integer"},
        "editable": _FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "time": _object({"from": _TEXT, "to": _TEXT}),
        "timepicker": {"type": "object"},
        "timezone": {"enum": ["browser", "utc"]},
        "annotations": _object({"list": {"type": "array"}}),
        "links": {"type": "array"},
        "templating": _object({"list": {"type": "array", "items": _VARIABLE}}),
        "panels": {
            "type": "array",
            "items": {"oneOf": [_ROW, _panel("stat", _STAT_OPTIONS), _panel("timeseries", _SERIES_OPTIONS)]},
        },
    }
)
