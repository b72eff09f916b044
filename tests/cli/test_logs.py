from __future__ import annotations

import logging
import subprocess
import sys

from p2pdpt.cli.logs import LineFormatter


def test_one_line_with_what_the_record_names() -> None:
    record = logging.LogRecord("p2pdpt.x", logging.WARNING, "x.py", 1, "lost %s", ("node1",), None)
    record.created = 0.0
    assert LineFormatter().format(record) == "1970-01-01T00:00:00Z WARNING lost node1"
    record.node, record.run, record.step = "node0", "digits", 3
    assert LineFormatter().format(record) == (
        "1970-01-01T00:00:00Z WARNING node0 digits 3 lost node1"
    )


def test_an_error_that_was_logged_with_its_traceback_keeps_it() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        record = logging.LogRecord("p", logging.ERROR, "x.py", 1, "bug", (), sys.exc_info())
    assert LineFormatter().format(record).split("\n")[-1] == "KeyError: 'x'"


def test_records_below_the_level_are_dropped() -> None:
    code = (
        "import logging; from p2pdpt.cli.logs import set_up_logging; set_up_logging('warning');"
        "logging.getLogger('p').info('no'); logging.getLogger('p').warning('yes')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == ""
    assert result.stderr.endswith("Z WARNING yes\n") and result.stderr.count("\n") == 1
