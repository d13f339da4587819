#!/bin/sh
# A compiler of policies that compiles each module once for the same limits. The real compiler is `berth` beside this
# script, and its replies are stored in the folder `kept` beside this script.
here=${0%/*}
module=$(mktemp "$here/module.XXXXXX")
trap 'rm -f "$module" "$module.code" "$module.reply"' EXIT
cat >"$module"
digest=$(echo "$@" | cat - "$module" | sha256sum)
reply="$here/kept/${digest%% *}"
if [ ! -e "$reply" ]; then
    # The reply comes through a pipe, since the compiler may not write files, and is renamed once it is complete, since
    # other tests read it.
    { "$here/berth" "$@" <"$module"; echo $? >"$module.code"; } | cat >"$module.reply"
    read -r code <"$module.code"
    if [ "$code" -ne 0 ]; then
        rm -f "$module" "$module.code" "$module.reply"
        [ "$code" -gt 128 ] && kill -$((code - 128)) $$
        exit "$code"
    fi
    mv "$module.reply" "$reply"
fi
cat "$reply"
