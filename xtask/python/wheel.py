"""Packs a folder as a wheel: wheel.py FOLDER OUT.whl. The folder has the packages and NAME.dist-info with METADATA and WHEEL."""

import base64
import hashlib
import pathlib
import sys
import zipfile

folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
(info,) = folder.glob("*.dist-info")
record = []
with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        data = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
        # pip keeps whether a file can be executed.
        entry.external_attr = (0o100755 if path.stat().st_mode & 0o100 else 0o100644) << 16
        wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
    record.append(f"{info.name}/RECORD,,\n")
    wheel.writestr(zipfile.ZipInfo(f"{info.name}/RECORD", (2020, 1, 1, 0, 0, 0)), "".join(record), zipfile.ZIP_DEFLATED)
