// Prints what GitOps tools make of the object on standard input: the status of kstatus, the library of Flux, and the health that
// Argo CD's interpreter computes with the script whose file is the argument.
package main

import (
	"fmt"
	"io"
	"os"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(script string) error {
	object := &unstructured.Unstructured{}
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	if err := object.UnmarshalJSON(text); err != nil {
		return err
	}
	result, err := status.Compute(object)
	if err != nil {
		return err
	}
	// As Argo CD does (util/lua): the object is the global variable obj, and the script returns a table.
	machine := lua.NewState()
	defer machine.Close()
	machine.SetGlobal("obj", value(machine, object.Object))
	if err := machine.DoFile(script); err != nil {
		return err
	}
	health, ok := machine.Get(-1).(*lua.LTable)
	if !ok {
		return fmt.Errorf("%s returns no table", script)
	}
	fmt.Println(result.Status, health.RawGetString("status"))
	return nil
}

func value(machine *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case map[string]any:
		table := machine.NewTable()
		for key, one := range from {
			table.RawSetString(key, value(machine, one))
		}
		return table
	case []any:
		table := machine.NewTable()
		for _, one := range from {
			table.Append(value(machine, one))
		}
		return table
	case string:
		return lua.LString(from)
	case bool:
		return lua.LBool(from)
	case int64:
		return lua.LNumber(from)
	case float64:
		return lua.LNumber(from)
	}
	return lua.LNil
}
