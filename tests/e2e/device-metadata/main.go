// Reads the metadata file of a claim's container with Kubernetes' own decoder, and prints each version of it as a line of JSON.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	content, err := os.ReadFile(os.Args[1])
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(content))
	for decoder.More() {
		var shown metadata.DeviceMetadata
		var invalid error
		var version schema.GroupVersionKind
		err := devicemetadata.DecodeMetadataFromStream(decoder, &shown,
			devicemetadata.DecodeMetadataWithValidationResult(&invalid),
			devicemetadata.DecodeMetadataStoreGVKResult(&version))
		if err == nil {
			err = invalid
		}
		if err != nil {
			return err
		}
		requests := map[string][]map[string]any{}
		for _, request := range shown.Requests {
			for _, device := range request.Devices {
				requests[request.Name] = append(requests[request.Name], map[string]any{
					"name": device.Name, "pool": device.Pool, "driver": device.Driver, "attributes": device.Attributes,
				})
			}
		}
		line := map[string]any{
			"version": version.Version, "uid": shown.UID, "name": shown.Name, "namespace": shown.Namespace,
			"generation": shown.Generation, "podClaimName": shown.PodClaimName, "requests": requests,
		}
		if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
			return err
		}
	}
	return nil
}
