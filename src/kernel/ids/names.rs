//! Identifiers that cross the daemon's interfaces, each parsed once into a type that is always valid.

use std::fmt;
use std::sync::Arc;

/// Longest device id in bytes: the limit of `Device.ID` in the kubelet's device plugin API.
pub const DEVICE_ID_BYTES_MAX: usize = 63;
/// Longest part id in bytes: a device id without `::65535`.
pub const PART_ID_BYTES_MAX: usize = DEVICE_ID_BYTES_MAX - 7;
/// Highest share number of a part.
pub const SHARE_NUMBER_MAX: u32 = 65_535;
/// Longest resource name in bytes: a DNS name (253), a slash and a qualified name (63), minus the
/// prefix `requests.` (9) that resource quotas add.
pub const RESOURCE_BYTES_MAX: usize = 253 + 1 + 63 - 9;

/// A name that is not valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadName {
    /// The kind of name: `resource`, `part`, `device`, ...
    pub kind: &'static str,
    /// The text, cut to 80 characters.
    pub given: String,
    /// The rule that it breaks.
    pub rule: &'static str,
}

impl BadName {
    pub(crate) fn new(kind: &'static str, given: &str, rule: &'static str) -> Self {
        Self { kind, given: given.chars().take(80).collect(), rule }
    }
}

impl fmt::Display for BadName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let article = if self.kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
        write!(f, "{:?} is not {article} {} name: {}", self.given, self.kind, self.rule)
    }
}

impl std::error::Error for BadName {}

macro_rules! text_name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

text_name! {
    /// The UUID of a part: a whole GPU (`GPU-...`) or a MIG instance (`MIG-...`).
    PartId
}
text_name! {
    /// An extended resource name such as `nvidia.com/gpu.shared`.
    Resource
}
text_name! {
    /// sha256 of a policy component, 64 lower-case hex digits.
    Digest
}

impl PartId {
    /// Parses a UUID in any spelling of it: the id has NVML's, with `GPU-` or `MIG-` in capitals and the digits in
    /// lower case. A text of another form, as a simulated GPU may have, stays as it is.
    ///
    /// # Errors
    /// If it is empty, too long for a device id, or holds a character other than ASCII letters,
    /// digits, `-`, `_`, `.` and `/` (old MIG names hold slashes).
    pub fn parse(text: &str) -> Result<Self, BadName> {
        if text.is_empty() || text.len() > PART_ID_BYTES_MAX {
            return Err(BadName::new("part", text, "1 to 56 characters"));
        }
        if !text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b)) {
            return Err(BadName::new("part", text, "letters, digits, '-', '_', '.' and '/' only"));
        }
        Ok(Self(as_nvml_writes_it(text).as_deref().unwrap_or(text).into()))
    }

    /// Whether it has the form of NVML's UUIDs, of a GPU or a MIG instance.
    #[must_use]
    pub fn is_nvidia_uuid(&self) -> bool {
        self.0.starts_with("GPU-") || self.0.starts_with("MIG-")
    }
}

/// NVML's spelling of a UUID: `GPU-<uuid>`, `MIG-<uuid>`, or a MIG instance's of older drivers,
/// `MIG-GPU-<uuid>/<gpu instance>/<compute instance>`. `None` for a text of another form.
fn as_nvml_writes_it(text: &str) -> Option<String> {
    let begins =
        |prefix: &&str| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    let prefix = ["MIG-GPU-", "MIG-", "GPU-"].into_iter().find(begins)?;
    let (uuid, rest) = text[prefix.len()..].split_at_checked(36)?;
    let is_uuid = uuid.bytes().enumerate().all(|(at, byte)| match at {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    });
    let is_whole = rest.is_empty() || rest.starts_with('/');
    (is_uuid && is_whole).then(|| format!("{prefix}{}{rest}", uuid.to_ascii_lowercase()))
}

/// The UUID of a GPU: its health, its marks and its processes have this key. A whole GPU is a part as well, with the same
/// UUID; a MIG instance is a part of a GPU. The id of a part that is not known counts as its GPU's, as in old decisions of
/// the journal.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId(PartId);

impl GpuId {
    /// Parses a UUID, as [`PartId::parse`] does.
    ///
    /// # Errors
    /// If it is not a valid part id.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        PartId::parse(text).map(Self)
    }

    /// The GPU with the UUID of a part that is a whole GPU.
    #[must_use]
    pub fn of_whole(part: &PartId) -> Self {
        Self(part.clone())
    }

    /// The whole GPU as a part.
    #[must_use]
    pub fn as_part(&self) -> &PartId {
        &self.0
    }

    /// The UUID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Display for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl Resource {
    /// `nvidia.com/gpu`: the default resource of whole GPUs.
    #[must_use]
    pub fn nvidia_gpu() -> Self {
        Self("nvidia.com/gpu".into())
    }

    /// Parses an extended resource name, by the kubelet's own rule (`IsExtendedResourceName`):
    /// a domain that is not `kubernetes.io`, a slash, and a qualified name.
    ///
    /// # Errors
    /// If the kubelet would refuse to register it.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let bad = |rule| Err(BadName::new("resource", text, rule));
        if text.len() > RESOURCE_BYTES_MAX {
            return bad("at most 308 characters");
        }
        let Some((domain, name)) = text.split_once('/') else {
            return bad("a domain, a slash and a name, such as nvidia.com/gpu");
        };
        if domain.starts_with("requests.") {
            return bad("the domain must not start with 'requests.'");
        }
        if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
            return bad("the domain kubernetes.io is reserved");
        }
        let label = |l: &str| {
            !l.is_empty()
                && l.len() <= 63
                && l.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !l.starts_with('-')
                && !l.ends_with('-')
        };
        if !domain.split('.').all(label) {
            return bad("the domain must be a lower-case DNS name");
        }
        let inner = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
        let bytes = name.as_bytes();
        if name.len() > 63
            || !name.bytes().all(inner)
            || !ends(bytes.first().copied())
            || !ends(bytes.last().copied())
        {
            return bad(
                "after the slash 1 to 63 letters, digits, '-', '_' or '.', first and last a letter or digit",
            );
        }
        Ok(Self(text.into()))
    }
}

impl Digest {
    /// Parses 64 lower-case hex digits, with or without the prefix `sha256:`.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        let ok = hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if ok { Ok(Self(hex.into())) } else { Err(BadName::new("digest", text, "64 lower-case hex digits")) }
    }

    /// The first twelve digits, for display.
    #[must_use]
    pub fn short(&self) -> &str {
        &self.0[..12]
    }
}

/// A device as the kubelet counts it: a whole part, or one share of it. Unique under one resource.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// The part that the device is on.
    pub part: PartId,
    /// `None` for the whole part (its id is the UUID), else the share number (`<uuid>::<n>`).
    pub share: Option<u32>,
}

impl DeviceId {
    /// The device that is a whole part.
    #[must_use]
    pub fn whole(part: &PartId) -> Self {
        Self { part: part.clone(), share: None }
    }

    /// Share `n` of a part.
    #[must_use]
    pub fn share(part: &PartId, n: u32) -> Self {
        Self { part: part.clone(), share: Some(n) }
    }

    /// Parses `<uuid>` or `<uuid>::<n>`, the format of NVIDIA's device plugin.
    ///
    /// # Errors
    /// If the UUID is not a valid part id, or `n` is not a number from 0 to 65535 without leading zeros.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let Some((part, n)) = text.split_once("::") else {
            return Ok(Self { part: PartId::parse(text)?, share: None });
        };
        let number: Option<u32> = n.parse().ok().filter(|v| *v <= SHARE_NUMBER_MAX);
        match number {
            Some(v) if v.to_string() == n => Ok(Self { part: PartId::parse(part)?, share: Some(v) }),
            _ => Err(BadName::new("device", text, "<uuid> or <uuid>::<n> with n from 0 to 65535")),
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.share {
            None => write!(f, "{}", self.part),
            Some(n) => write!(f, "{}::{n}", self.part),
        }
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// The kernel's key of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceKey {
    /// The resource that it is listed under.
    pub resource: Resource,
    /// Its id there.
    pub id: DeviceId,
}

/// The permanent id of one grant: its store, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId {
    /// Drawn at random when the store was created, so that ids of a wiped store, which the kubelet's
    /// checkpoint may still hold, are not issued again.
    pub store: u32,
    /// Counts up in that store.
    pub number: u64,
}

impl AllocationId {
    /// Parses `xxxxxxxx-n`: eight hex digits and a decimal number.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let bad = || BadName::new("allocation", text, "eight hex digits, '-' and a number");
        let (store, number) = text.split_once('-').ok_or_else(bad)?;
        let parsed = Self {
            store: u32::from_str_radix(store, 16).map_err(|_| bad())?,
            number: number.parse().map_err(|_| bad())?,
        };
        if parsed.to_string() == text { Ok(parsed) } else { Err(bad()) }
    }
}

impl fmt::Display for AllocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:08x}-{}", self.store, self.number))
    }
}

/// Whether it is a DNS label in lower case (RFC 1123), as Kubernetes accepts it as the name of a namespace
/// or of a request of a claim.
#[must_use]
pub fn is_dns_label(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(is_inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_ids_parse_back_from_their_text() {
        for text in ["GPU-1", "GPU-1::0", "MIG-GPU-9/1/0::65535"] {
            assert_eq!(DeviceId::parse(text).unwrap().to_string(), text);
        }
        for text in ["", "GPU-1::", "GPU-1::01", "GPU-1::65536", "GPU-1::-1", "a b", "GPU-1::2::3", "GPU\n"] {
            assert!(DeviceId::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_uuid_has_one_spelling() {
        let uuid = "8a56a4bc-e184-a047-2620-be19fdf913d5";
        for (text, id) in [
            (format!("GPU-{}", uuid.to_uppercase()), format!("GPU-{uuid}")),
            (format!("gpu-{uuid}"), format!("GPU-{uuid}")),
            (format!("mig-{uuid}"), format!("MIG-{uuid}")),
            (format!("MIG-gpu-{}/1/0", uuid.to_uppercase()), format!("MIG-GPU-{uuid}/1/0")),
            // Names of another form are left as they are.
            ("gpu-A".into(), "gpu-A".into()),
            (format!("GPU-{uuid}X"), format!("GPU-{uuid}X")),
            (uuid.to_uppercase(), uuid.to_uppercase()),
        ] {
            assert_eq!(PartId::parse(&text).unwrap().as_str(), id, "{text}");
        }
        let upper = format!("GPU-{}::3", uuid.to_uppercase());
        assert_eq!(DeviceId::parse(&upper).unwrap().to_string(), format!("GPU-{uuid}::3"));
    }

    #[test]
    fn only_resource_names_that_the_kubelet_registers_parse() {
        for text in ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "a/b", "x.example/A_b.c"] {
            assert!(Resource::parse(text).is_ok(), "{text:?}");
        }
        let long = format!("a/{}", "b".repeat(64));
        for text in [
            "gpu",
            "nvidia.com/",
            "/gpu",
            "kubernetes.io/gpu",
            "x.kubernetes.io/g",
            "requests.a/b",
            "A/b",
            "a/b/c",
            "a/-b",
            &long,
        ] {
            assert!(Resource::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn allocation_ids_parse_back_from_their_text() {
        let id = AllocationId { store: 0xab, number: 17 };
        assert_eq!(id.to_string(), "000000ab-17");
        assert_eq!(AllocationId::parse("000000ab-17").unwrap(), id);
        for text in ["", "ab-17", "000000ab-017", "000000AB-17", "000000ab"] {
            assert!(AllocationId::parse(text).is_err(), "{text:?}");
        }
    }
}
