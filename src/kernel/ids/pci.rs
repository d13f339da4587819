//! The bus id of a PCI device: one value for all spellings of it.

use crate::ids::names::BadName;
use std::fmt;

/// A PCI bus id. NVML writes `00000000:1B:00.0`, sysfs and procfs `0000:1b:00.0`, `lspci` also `1b:00.0`; all are the
/// same value. Its text is NVML's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciBusId {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciBusId {
    /// Parses every spelling: upper or lower case, a domain of one to eight digits or none (then it is 0).
    ///
    /// # Errors
    /// If it is no bus id, or a number is beyond PCI's limits.
    pub fn parse(text: &str) -> Result<Self, BadName> {
        let bad = || BadName::new("PCI bus", text, "[domain:]bus:device.function, such as 0000:1b:00.0");
        let hex = |digits: &str, digits_max: usize, most: u32| {
            // `from_str_radix` would take a sign.
            let is_hex =
                (1..=digits_max).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            u32::from_str_radix(digits, 16).ok().filter(|value| is_hex && *value <= most)
        };
        let byte = |digits, digits_max, most| {
            hex(digits, digits_max, most).and_then(|value| u8::try_from(value).ok())
        };
        let fields: Vec<&str> = text.split(':').collect();
        let (domain, bus, rest) = match fields[..] {
            [domain, bus, rest] => (domain, bus, rest),
            [bus, rest] => ("0", bus, rest),
            _ => return Err(bad()),
        };
        let (device, function) = rest.split_once('.').ok_or_else(bad)?;
        Ok(Self {
            domain: hex(domain, 8, u32::MAX).ok_or_else(bad)?,
            bus: byte(bus, 2, 0xff).ok_or_else(bad)?,
            device: byte(device, 2, 0x1f).ok_or_else(bad)?,
            function: byte(function, 1, 7).ok_or_else(bad)?,
        })
    }

    /// The name of the device in sysfs and procfs, where the domain has at least four digits (Linux:
    /// `pci_setup_device`, `%04x`).
    #[must_use]
    pub fn sysfs_name(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Display for PciBusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:08X}:{:02X}:{:02X}.{:X}", self.domain, self.bus, self.device, self.function))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_are_one_value() {
        for (spellings, nvml, sysfs) in [
            (
                &["00000000:1B:00.0", "0000:1b:00.0", "0:1B:00.0", "1b:00.0"][..],
                "00000000:1B:00.0",
                "0000:1b:00.0",
            ),
            // A domain beyond ffff, as of GPUs behind Intel VMD or on some Arm servers.
            (&["00010000:65:00.0", "10000:65:00.0"], "00010000:65:00.0", "10000:65:00.0"),
            (&["00000009:01:1f.7", "0009:01:1F.7"], "00000009:01:1F.7", "0009:01:1f.7"),
        ] {
            for text in spellings {
                let id = PciBusId::parse(text).unwrap();
                assert_eq!((id.to_string().as_str(), id.sysfs_name().as_str()), (nvml, sysfs), "{text}");
                assert_eq!(id, PciBusId::parse(nvml).unwrap());
            }
        }
    }

    #[test]
    fn what_is_no_bus_id_is_refused() {
        for text in [
            "",
            "3",
            "1b",
            "1b:00",
            "0000:1b:00",
            "000000000:1b:00.0",
            "0000:1b:20.0",
            "0000:1b:00.8",
            "0000:+b:00.0",
            "0000:1b:00.0:1",
            "GPU-1",
            "0000:1g:00.0",
        ] {
            assert!(PciBusId::parse(text).is_err(), "{text}");
        }
    }
}
