// The Go client at work: it lists GPUs, cordons one with and without a body and on a condition, uploads a policy and
// activates it. Run by lint.py with the address, the token and the module of a policy.
package main

import (
	"context"
	"fmt"
	"os"

	"client/berth"
)

func check(holds bool, found any) {
	if !holds {
		panic(fmt.Sprintf("unexpected: %v", found))
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		if api, ok := err.(*berth.GenericOpenAPIError); ok {
			panic(fmt.Sprintf("%v: %s", err, api.Body()))
		}
		panic(err)
	}
	return value
}

func main() {
	url, token, module := os.Args[1], os.Args[2], os.Args[3]
	settings := berth.NewConfiguration()
	settings.Servers = berth.ServerConfigurations{{URL: url}}
	client := berth.NewAPIClient(settings)
	ctx := context.WithValue(context.Background(), berth.ContextAccessToken, token)

	list, _, err := client.GpusAPI.ListGpus(ctx).Execute()
	gpus := must(list, err).Items
	check(len(gpus) == 8, gpus)
	uuid := gpus[0].Uuid

	_, answer, err := client.GpusAPI.GetDrainOfGpu(ctx, uuid).Execute()
	must(answer, err)
	tag := answer.Header.Get("ETag")
	// The client sends a body that is left out as null.
	gpu, _, err := client.GpusAPI.CordonGpu(ctx, uuid).IfMatch(tag).Execute()
	check(must(gpu, err).Drain.State == berth.DrainStateCordoned, gpu)
	cordon := berth.NewCordon()
	cordon.SetReason("api-lint")
	_, answer, err = client.GpusAPI.CordonGpu(ctx, uuid).Cordon(*cordon).IfMatch(tag).Execute()
	check(err != nil && answer.StatusCode == 412, answer)
	problem, ok := err.(*berth.GenericOpenAPIError).Model().(berth.Problem)
	check(ok && problem.Type == "/problems/changed-meanwhile", err)
	gpu, _, err = client.GpusAPI.CordonGpu(ctx, uuid).Cordon(*cordon).Execute()
	check(must(gpu, err).Drain.GetWhy() == "api-lint", gpu)
	gpu, _, err = client.GpusAPI.UncordonGpu(ctx, uuid).Execute()
	check(must(gpu, err).Drain.State == berth.DrainStateActive, gpu)

	file, err := os.Open(module)
	must(file, err)
	policy, answer, err := client.PoliciesAPI.UploadPolicy(ctx).Body(file).Reason("api-lint").Execute()
	must(policy, err)
	check(answer.StatusCode == 200 || answer.StatusCode == 201, answer)
	entry := berth.NewStackEntrySpec(policy.Name)
	entry.SetDigest(policy.Digest)
	stack, _, err := client.StackAPI.ActivateStack(ctx).StackSpec(*berth.NewStackSpec([]berth.StackEntrySpec{*entry})).Execute()
	check(must(stack, err).Source == berth.StackSourceApi, stack)
	fmt.Printf("Go client: %d GPUs, policy %s, stack %d\n", len(gpus), policy.Name, stack.Revision)
}
