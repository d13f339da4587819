//! What each kind of problem means and what to do about it: the one table behind the pages under
//! `/problems/`. No wildcard arm: a new kind does not compile until somebody writes its page.

use berth_api::Kind;

/// A page's two paragraphs.
pub(super) struct Words {
    /// When it is answered.
    pub(super) means: &'static str,
    /// What helps.
    pub(super) todo: &'static str,
}

/// The words of a kind.
pub(super) fn words(kind: Kind) -> Words {
    let (means, todo) = match kind {
        Kind::NoRoute => (
            "Nothing is at this path.",
            "Compare the path with /swagger-ui/, which shows every route. All of the API is below /api/v1.",
        ),
        Kind::Method => (
            "The path is known, but not with this method.",
            "The Allow header of the answer names the methods that it has.",
        ),
        Kind::Path => (
            "A part of the path is not what stands in its place: no UUID, no id, no number, no digest.",
            "The detail says which rule it breaks. The lists (GET /api/v1/gpus, /allocations, /policies) show how such names look.",
        ),
        Kind::Query => (
            "A key of the query is unknown, or its value cannot be taken.",
            "The detail names the key and the rule. A cursor must be the `next` of an earlier answer, as it was.",
        ),
        Kind::Header => (
            "A header that this route reads is malformed: If-Match, Last-Event-ID or Berth-Signature. Or If-Match came where there is no ETag to hold it against.",
            "The detail names the header and its form. Send ETags as they came, with their quotes; leave If-Match out where the route takes none.",
        ),
        Kind::Body => (
            "The body ended early, or its coding is broken.",
            "Send it again. If it happens again, look at what lies between client and daemon: a proxy that cuts bodies, a wrong Content-Length.",
        ),
        Kind::Json => ("The body is not JSON.", "The detail says at which line and column reading stopped."),
        Kind::Invalid => (
            "The body is JSON, and a value in it cannot be taken: an unknown key, a number out of its range, a policy that this node does not know.",
            "The detail names the key and the rule; /swagger-ui/ shows a whole example of each body.",
        ),
        Kind::MediaType => (
            "The Content-Type is another one than the route takes.",
            "Send JSON as application/json and policies as application/wasm.",
        ),
        Kind::TooLarge => (
            "The body is larger than the route takes: 256 KiB of JSON, 32 MiB of a policy.",
            "Policies of interpreted languages shrink when debug sections are stripped (wasm-tools strip).",
        ),
        Kind::Slow => (
            "The body did not come in time: 10 s for JSON, 60 s for a policy.",
            "Send it over a faster way, from the node itself at best.",
        ),
        Kind::Unauthorized => (
            "The request carries no token that this daemon takes.",
            "Send the content of the token file (by default /var/lib/berth/token on the node) as Authorization: Bearer TOKEN. `berth token rotate` makes a new one.",
        ),
        Kind::Forbidden => (
            "The daemon knows who asks, and they may not do this: a token or certificate that only reads, a user whom the cluster does not allow it, or a page of another site.",
            "Use a token or a certificate with the right `change`, or have the right granted: `admin` in the daemon's configuration, or a ClusterRole with nonResourceURLs /berth/*.",
        ),
        Kind::TooMany => (
            "One client asked more often than the daemon answers one client.",
            "Wait as long as Retry-After says, and ask less often. The rates are `admin.limits` in the daemon's configuration.",
        ),
        Kind::NoReview => (
            "The token is none of the daemon's own, and the API server did not say whose it is and what they may do.",
            "Try again; the daemon's log says what is wrong. One of the daemon's own tokens opens meanwhile.",
        ),
        Kind::Host => (
            "The Host header names another machine than this one. This guards against web pages that make a browser ask this listener.",
            "Use http://127.0.0.1 or http://localhost, on the node itself or through kubectl port-forward.",
        ),
        Kind::UnknownGpu => (
            "This node has no GPU with that UUID, or let it go.",
            "GET /api/v1/gpus lists the GPUs with their UUIDs.",
        ),
        Kind::UnknownAllocation => (
            "No live allocation has this id, and no ended one that is still kept.",
            "GET /api/v1/allocations?state=all lists them. history.allocations in the configuration says how many ended ones are kept.",
        ),
        Kind::Running => (
            "A source shows that the pod of this allocation runs, or it was granted so recently that its container may be starting. The detail names the pod and each source. Nothing was changed.",
            "Delete the pod (kubectl delete pod): its allocation ends by itself. Where the source is wrong or will not come back, DELETE /api/v1/allocations/{id}?force=true ends the allocation; it does not stop the pod, and its GPU can be granted to another pod at once.",
        ),
        Kind::Ended => (
            "The allocation ended before this request. Nothing was changed.",
            "GET /api/v1/allocations/{id} shows when it ended and why.",
        ),
        Kind::UnknownPolicy => (
            "This node has no policy version with that digest.",
            "GET /api/v1/policies lists what it has; POST /api/v1/policies uploads one.",
        ),
        Kind::UnknownDecision => (
            "No decision with this number is on the record: it was dropped by age or size, or never put down.",
            "GET /api/v1/decisions lists what is there. decisions.maxMiB and maxAgeDays in the configuration bound the record.",
        ),
        Kind::UnknownShadow => (
            "No policy is asked as a shadow under this number. Shadows end with the daemon.",
            "GET /api/v1/shadows lists them.",
        ),
        Kind::UnknownDevice => (
            "No such device is listed under this resource.",
            "GET /api/v1/gpus/{uuid} shows the devices of a GPU.",
        ),
        Kind::Held => (
            "An allocation holds it, or what is left of the GPU is too little.",
            "GET /api/v1/allocations?gpu=UUID shows who holds it. It ends once its pod is gone; DELETE /api/v1/allocations/{id} ends one by your word.",
        ),
        Kind::State => (
            "What was asked does not fit the present state: a GPU that is there cannot be let go, a stack that is active cannot be rolled back to.",
            "The detail says which state that is. Read it again and decide anew.",
        ),
        Kind::NoApiServer => (
            "Pods are evicted through the Kubernetes API server, and this daemon has none.",
            "Start it in a pod with a service account, or with --kubeconfig FILE; or drain without evict and end the pods yourself.",
        ),
        Kind::NoJournal => (
            "This daemon keeps no record of decisions.",
            "Set decisions.maxMiB in the configuration above 0, and look in the log why the record could not be opened.",
        ),
        Kind::Denied => (
            "A policy of the stack denies it, or fails where its entry says that a failure denies.",
            "The detail has the policy's own words. GET /api/v1/decisions?outcome=denied shows the decision.",
        ),
        Kind::Changed => (
            "Somebody else changed it since you read it: If-Match does not hold any more.",
            "Read it again, see whether your change still makes sense, and send it with the new ETag.",
        ),
        Kind::InUse => (
            "A policy version that is in the active stack, is asked as a shadow, or came with the daemon cannot be deleted.",
            "Activate a stack without it (PUT /api/v1/stack), or end the shadow; what came with the daemon stays.",
        ),
        Kind::Limit => (
            "As many as there may be are there: policy versions, shadows, entries of a stack, live allocations.",
            "Delete what is no longer needed. The detail has the number.",
        ),
        Kind::NotAPolicy => (
            "The bytes are no WebAssembly component of the world berth:policy, or one that says nonsense of itself.",
            "`berth policy check FILE` says the same offline, with more words; `berth policy new` writes a policy that passes.",
        ),
        Kind::TooCostly => (
            "Compiling the policy took more memory or time than a node may spend.",
            "Make it smaller: build it for size, strip it, leave out what it does not call.",
        ),
        Kind::StackFails => (
            "A policy of the stack failed when it was asked what this node offers, or its parameters are refused. Nothing was changed.",
            "The detail has the policy's own words. `berth policy try` asks the live node without effect.",
        ),
        Kind::Untrusted => (
            "The configuration has trustedKeys, and none of them signed these bytes.",
            "Sign the file with the private half of such a key (openssl pkeyutl -sign -rawin) and send the signature as Berth-Signature.",
        ),
        Kind::UnknownRevision => (
            "The history of stacks has no such revision; it keeps the newest 16.",
            "GET /api/v1/stack/history lists them.",
        ),
        Kind::UnknownEntry => (
            "The active stack has no entry at this place.",
            "GET /api/v1/stack shows the entries; places are counted from 0.",
        ),
        Kind::Lost => (
            "The files of this policy version are gone from the state folder, or no longer what they were.",
            "Upload the same bytes again: they get the same digest.",
        ),
        Kind::Busy => (
            "Too much waits already: commands, uploads, compilations or replays; or another upload of the same caller is at work. Nothing was changed.",
            "Send it again after the seconds that the Retry-After header names.",
        ),
        Kind::Stopping => (
            "The daemon is on its way down, or its ledger has ended.",
            "Send it again in a few seconds; a supervisor restarts the daemon. What was answered with success is kept.",
        ),
        Kind::Store => (
            "The store on the disk did not take a write, so nothing was changed.",
            "Look at the disk under the state folder: full, read-only, gone? The daemon tries again by itself.",
        ),
        Kind::NotReady => (
            "The daemon lives and cannot grant yet. `checks` says what it waits for.",
            "`berth node check` on the node says what is missing, with the fix.",
        ),
        Kind::NotAlive => (
            "Something that has to move does not: the ledger's writer, the policy thread, a look at the GPUs or a stream. `checks` says which.",
            "The kubelet restarts the daemon by its liveness probe. Where looks at the GPUs hang, NVML or the GPU does: look at `dmesg` for Xid errors and reset the GPU or restart the node.",
        ),
        Kind::Streams => (
            "As many event streams are open as this daemon serves at a time, 32, and you have no fewer than others.",
            "Close pages and `berth events` that nobody looks at, or ask with ?follow=false now and then.",
        ),
        Kind::Unread => (
            "So much of large answers was asked for and not read yet that the daemon keeps no more of them: by one client, or by all. Small answers and changes are not held up.",
            "Read each answer before you ask for the next one, and ask for less at a time (`limit`). Send it again after the seconds that the Retry-After header names.",
        ),
        Kind::NotAcceptable => (
            "Accept-Encoding forbids every coding that this daemon can answer in.",
            "Leave the header out, or allow identity or gzip.",
        ),
        Kind::Late => (
            "No answer came in time; what was asked may or may not be done.",
            "Read the state again before you send it once more. PUT and DELETE may be repeated safely.",
        ),
        Kind::Internal => (
            "Something is wrong with the daemon itself.",
            "Its log has more. Please report it with the request that leads to it.",
        ),
    };
    Words { means, todo }
}
