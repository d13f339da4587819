// `my-policy`: fills one GPU before the next one is used, whichever policy offers the shares.
//
// A starting point for a policy. Every function is one hook of wit/policy.wit; false means "pass": the next
// policy of the stack is called. Each call runs in a fresh instance, so no state is kept and nothing has to be
// freed. build.sh generates bindings/policy.h with the types.

#include <stdlib.h>
#include <string.h>

#include "policy.h"

static const char SCHEMA[] =
    "{\"$schema\": \"https://json-schema.org/draft/2020-12/schema\", \"type\": \"object\","
    " \"additionalProperties\": false}";

void exports_policy_describe(policy_description_t *ret) {
    policy_string_dup(&ret->name, "my-policy");
    policy_string_dup(&ret->version, "0.1.0");
    policy_string_dup(&ret->summary, "Fills one GPU before the next one is used.");
    ret->hooks = BERTH_POLICY_TYPES_HOOKS_PLACE;
    policy_string_dup(&ret->parameters_schema, SCHEMA);
}

static bool contains(const uint32_t *list, size_t len, uint32_t wanted) {
    for (size_t i = 0; i < len; i++)
        if (list[i] == wanted) return true;
    return false;
}

// Which devices to choose: those on the GPU with the fewest available ones. Devices are indices into node.devices.
bool exports_policy_place(policy_context_t *ctx, policy_place_request_t *request, policy_placement_t *ret) {
    const berth_policy_types_device_t *devices = ctx->node.devices.ptr;
    const uint32_t *available = request->available.ptr;
    size_t count = request->available.len, parts = ctx->node.parts.len;

    uint32_t *left = calloc(parts + 1, sizeof *left);
    uint32_t *chosen = calloc(request->size + 1, sizeof *chosen);
    if (!left || !chosen) abort();
    for (size_t i = 0; i < count; i++) left[devices[available[i]].part]++;

    size_t n = 0;
    for (size_t i = 0; i < request->required.len && n < request->size; i++) chosen[n++] = request->required.ptr[i];
    while (n < request->size) {
        bool found = false;
        uint32_t best = 0;
        for (size_t i = 0; i < count; i++) {
            uint32_t device = available[i];
            if (contains(chosen, n, device)) continue;
            uint32_t part = devices[device].part, before = devices[best].part;
            bool fewer = left[part] < left[before], as_many = left[part] == left[before];
            if (!found || fewer || (as_many && part < before)) best = device, found = true;
        }
        if (!found) return false;
        chosen[n++] = best;
    }
    ret->devices.ptr = chosen;
    ret->devices.len = n;
    policy_string_dup(&ret->reason, "fills one GPU before the next one");
    return true;
}

bool exports_policy_offer(policy_context_t *ctx, policy_offer_answer_t *ret) {
    (void)ctx, (void)ret;
    return false;
}

bool exports_policy_admit(policy_context_t *ctx, policy_admit_request_t *request, policy_verdict_t *ret) {
    (void)ctx, (void)request, (void)ret;
    return false;
}

bool exports_policy_triage(policy_context_t *ctx, policy_reading_t *reading, policy_triage_answer_t *ret) {
    (void)ctx, (void)reading, (void)ret;
    return false;
}
