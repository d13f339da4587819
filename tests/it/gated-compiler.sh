#!/bin/sh
# Stands before the real compiler, which lies beside it as `berth`: waits while there is a file `hold`,
# fails while there is a file `fail`, and puts down when each compilation began and how it ended. What the
# real one once made of a module is kept in the folder `kept` and given again.
here=${0%/*}
echo began >>"$here/log"
module="$here/module.$$"
cat >"$module"
while [ -e "$here/hold" ]; do sleep 0.01; done
if [ -e "$here/fail" ]; then
    echo "out of order" >&2
    echo ended >>"$here/log"
    exit 1
fi
digest=$(sha256sum <"$module")
answer="$here/kept/${digest%% *}"
code=0
if [ ! -e "$answer" ]; then
    # Through a pipe: it may not write files. Whole or not at all: others look for it, too.
    { "$here/berth" "$@" <"$module"; echo $? >"$module.code"; } | cat >"$answer.$$"
    read -r code <"$module.code"
    if [ "$code" -eq 0 ]; then mv "$answer.$$" "$answer"; else rm "$answer.$$"; fi
fi
[ "$code" -eq 0 ] && cat "$answer"
echo ended >>"$here/log"
exit $code
