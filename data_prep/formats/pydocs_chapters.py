"""Which chapter of the library reference a top-level module belongs to: the root level of the `pydocs` tree.

Two hundred modules side by side is a level that a small model cannot judge; a library has shelves. Modules that no
chapter names stand on a shelf of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..corpus import Node

OTHER = "Other modules"

CHAPTERS = {
    "Text processing": "string re difflib textwrap unicodedata stringprep readline rlcompleter",
    "Binary data": "struct codecs",
    "Data types and data structures": (
        "datetime zoneinfo calendar collections heapq bisect array weakref types copy pprint reprlib enum graphlib "
        "builtins"
    ),
    "Numbers and mathematics": "numbers math cmath decimal fractions random statistics",
    "Functional programming": "itertools functools operator",
    "Files and directories": (
        "pathlib fileinput stat filecmp tempfile glob fnmatch linecache shutil posixpath ntpath genericpath"
    ),
    "Data persistence and databases": "pickle copyreg shelve marshal dbm sqlite3 pickletools",
    "Compression and archives": "zlib gzip bz2 lzma zipfile tarfile compression",
    "File formats": "csv configparser tomllib netrc plistlib xdrlib",
    "Cryptography": "hashlib hmac secrets crypt",
    "Operating system services": ("os io time argparse optparse getopt logging getpass curses platform errno ctypes"),
    "Concurrent execution": "threading multiprocessing concurrent subprocess sched queue contextvars",
    "Networking and interprocess communication": ("asyncio socket ssl select selectors asyncore asynchat signal mmap"),
    "Email and internet data": "email json mailcap mailbox mimetypes base64 binascii quopri uu binhex",
    "HTML and XML": "html xml",
    "Internet protocols": (
        "webbrowser wsgiref urllib http ftplib poplib imaplib nntplib smtplib smtpd telnetlib uuid socketserver xmlrpc "
        "ipaddress cgi cgitb"
    ),
    "Multimedia": "wave aifc audioop chunk colorsys imghdr sndhdr sunau ossaudiodev",
    "Internationalization": "gettext locale",
    "Programs with windows, turtles and command lines": "turtle cmd shlex tkinter",
    "Development, documentation and tests": "typing pydoc doctest unittest",
    "Debugging and profiling": "bdb faulthandler pdb profile cProfile pstats timeit trace tracemalloc",
    "Packaging and distribution": "ensurepip venv zipapp distutils",
    "Python runtime": (
        "sys sysconfig warnings dataclasses contextlib abc atexit traceback gc inspect site code codeop annotationlib"
    ),
    "Importing modules": "zipimport pkgutil modulefinder runpy importlib imp",
    "Python language services": (
        "ast symtable token keyword tokenize tabnanny pyclbr py_compile compileall dis opcode lib2to3"
    ),
    "Unix services": "posix pwd grp spwd termios tty pty fcntl pipes resource nis syslog",
}


def shelve(modules: Sequence[Node]) -> tuple[list[Node], dict[str, str]]:
    """Chapter nodes that hold any of these top-level modules, and the chapter id of each module."""
    chapter_of = {name: title for title, names in CHAPTERS.items() for name in names.split()}
    inside: dict[str, list[str]] = {}
    for module in modules:
        inside.setdefault(chapter_of.get(module.id, OTHER), []).append(module.id)
    ids = {title: f"chapter:{title.lower().replace(',', '').replace(' ', '-')}" for title in (*CHAPTERS, OTHER)}
    nodes = [
        Node(ids[title], None, title, "Modules: " + ", ".join(inside[title]))
        for title in (*CHAPTERS, OTHER)
        if title in inside
    ]
    return nodes, {module: ids[title] for title, held in inside.items() for module in held}
