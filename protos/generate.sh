#!/bin/sh
# Makes the Python code of the protos: generate.sh PYTHON OUT. Imports are rewritten to the package that it lives in.
set -eu
python=$1 out=$2
mkdir -p "$out"
"$python" -m grpc_tools.protoc -Iprotos --python_out="$out" --pyi_out="$out" protos/orca/v1/*.proto
find "$out" -name '*.py*' -exec sed -i 's/^from orca\.v1 import/from services.common.pb.orca.v1 import/' {} +
touch "$out/__init__.py" "$out/orca/__init__.py" "$out/orca/v1/__init__.py"
