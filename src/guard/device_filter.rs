//! Denies a cgroup access to device nodes: in v2 by a BPF program on it (`BPF_PROG_TYPE_CGROUP_DEVICE`), in v1 by `devices.deny`.
//! The only unsafe code of this crate: bpf(2), for which the C library has no function.
#![allow(unsafe_code, reason = "calls bpf(2)")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Character devices to which access is denied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeniedDevices {
    /// Major numbers of which all nodes are denied.
    pub majors: BTreeSet<u32>,
    /// A major number of which all nodes are denied but those with these minor numbers.
    pub all_but: Option<(u32, BTreeSet<u32>)>,
}

/// The highest minor number of a GPU's node, as the driver has them: all that v1 has to name one by one.
const MINOR_MAX: u32 = 255;

impl DeniedDevices {
    /// Denies them to the processes of this cgroup and of those below it. Files that are open stay open.
    ///
    /// # Errors
    /// If the kernel refuses it, or the program is not on the cgroup after that.
    pub fn apply_to(&self, cgroup: &Path) -> io::Result<()> {
        if self.majors.is_empty() && self.all_but.is_none() {
            return Ok(());
        }
        let deny = cgroup.join("devices.deny");
        if deny.exists() {
            let mut file = File::options().write(true).open(&deny)?;
            // Each write is one rule.
            self.v1_rules().iter().try_for_each(|rule| file.write_all(rule.as_bytes()))?;
            return self.check_v1(&fs::read_to_string(cgroup.join("devices.list"))?);
        }
        let cgroup = File::open(cgroup)?;
        let program = bpf::load(&self.program())?;
        let tag = bpf::tag(&program)?;
        // The kernel gives programs with the same instructions the same tag.
        let is_attached = || -> io::Result<bool> {
            let ids = bpf::attached(&cgroup)?;
            // A program that was removed in the meantime is skipped.
            Ok(ids
                .into_iter()
                .filter_map(|id| bpf::by_id(id).ok())
                .any(|one| bpf::tag(&one).is_ok_and(|t| t == tag)))
        };
        if !is_attached()? {
            bpf::attach(&cgroup, &program)?;
            if !is_attached()? {
                return Err(io::Error::other(
                    "the kernel does not list the program that was attached to the cgroup",
                ));
            }
        }
        Ok(())
    }

    /// Lines for `devices.deny`. In a cgroup to which single devices are allowed, a line only cancels an allowed one with the
    /// same numbers (kernel: `security/device_cgroup.c`), so that a wildcard is not enough.
    fn v1_rules(&self) -> Vec<String> {
        let mut rules = Vec::new();
        for major in &self.majors {
            rules.push(format!("c {major}:* rwm"));
            rules.extend((0..=MINOR_MAX).map(|minor| format!("c {major}:{minor} rwm")));
        }
        if let Some((major, open)) = &self.all_but {
            let denied = (0..=MINOR_MAX).filter(|minor| !open.contains(minor));
            rules.extend(denied.map(|minor| format!("c {major}:{minor} rwm")));
        }
        rules
    }

    /// Whether `devices.list` allows none of them. For a cgroup to which all devices but some are allowed the kernel lists no
    /// exceptions, and one that was written is in force.
    ///
    /// # Errors
    /// If it allows one.
    fn check_v1(&self, list: &str) -> io::Result<()> {
        let is_allowed = |line: &str| {
            let numbers = line.strip_prefix("c ")?.split(' ').next()?;
            let (major, minor) = numbers.split_once(':')?;
            let major = major.parse().ok()?;
            let among_all_but = self.all_but.as_ref().is_some_and(|(denied, open)| {
                *denied == major && minor.parse().ok().is_none_or(|minor| !open.contains(&minor))
            });
            (among_all_but || self.majors.contains(&major)).then(|| line.to_owned())
        };
        match list.lines().find_map(is_allowed) {
            Some(line) => Err(io::Error::other(format!("its device cgroup still allows `{line}`"))),
            None => Ok(()),
        }
    }

    /// The instructions of the program, which returns 1 if the access is allowed. Its argument is
    /// `struct bpf_cgroup_dev_ctx`: access and type, major, minor.
    fn program(&self) -> Vec<Instruction> {
        use Jump::{Allow, Deny};
        let mut code = vec![
            Step::Plain(Instruction::load_word(TYPE, ARGUMENT, 0)),
            Step::Plain(Instruction::and(TYPE, 0xffff)),
            Step::UnlessEqual(TYPE, CHARACTER_DEVICE, Allow),
            Step::Plain(Instruction::load_word(MAJOR, ARGUMENT, 4)),
            Step::Plain(Instruction::load_word(MINOR, ARGUMENT, 8)),
        ];
        code.extend(self.majors.iter().map(|major| Step::IfEqual(MAJOR, *major, Deny)));
        if let Some((major, open)) = &self.all_but {
            code.push(Step::UnlessEqual(MAJOR, *major, Allow));
            code.extend(open.iter().map(|minor| Step::IfEqual(MINOR, *minor, Allow)));
            code.push(Step::Always(Deny));
        }
        // What comes to the end is allowed.
        let allow = code.len();
        let target = |jump: &Jump| match jump {
            Allow => allow,
            Deny => allow + 2,
        };
        let resolved = code.iter().enumerate().map(|(at, step)| {
            // The number of instructions that are skipped.
            let skip = |jump| i16::try_from(target(jump) - at - 1).unwrap_or(i16::MAX);
            match step {
                Step::Plain(instruction) => *instruction,
                Step::IfEqual(register, value, jump) => {
                    Instruction::jump(0x15, *register, *value, skip(jump))
                }
                Step::UnlessEqual(register, value, jump) => {
                    Instruction::jump(0x55, *register, *value, skip(jump))
                }
                Step::Always(jump) => Instruction::jump(0x05, 0, 0, skip(jump)),
            }
        });
        let mut program: Vec<_> = resolved.collect();
        for result in [1, 0] {
            program.extend([Instruction::set(RESULT, result), Instruction::EXIT]);
        }
        program
    }
}

/// `BPF_DEVCG_DEV_CHAR`.
const CHARACTER_DEVICE: u32 = 2;
const RESULT: u8 = 0;
const ARGUMENT: u8 = 1;
const TYPE: u8 = 2;
const MAJOR: u8 = 3;
const MINOR: u8 = 4;

/// Where a jump goes.
enum Jump {
    Allow,
    Deny,
}

/// An instruction whose jump is not resolved yet.
enum Step {
    Plain(Instruction),
    IfEqual(u8, u32, Jump),
    UnlessEqual(u8, u32, Jump),
    Always(Jump),
}

/// `struct bpf_insn` (`linux/bpf.h`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// Destination in the low four bits, source in the high ones.
    registers: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    const EXIT: Self = Self { code: 0x95, registers: 0, offset: 0, immediate: 0 };

    /// `BPF_LDX | BPF_MEM | BPF_W`.
    const fn load_word(to: u8, from: u8, offset: i16) -> Self {
        Self { code: 0x61, registers: to | from << 4, offset, immediate: 0 }
    }

    /// `BPF_ALU | BPF_AND | BPF_K`.
    const fn and(register: u8, mask: i32) -> Self {
        Self { code: 0x54, registers: register, offset: 0, immediate: mask }
    }

    /// `BPF_ALU64 | BPF_MOV | BPF_K`.
    const fn set(register: u8, value: i32) -> Self {
        Self { code: 0xb7, registers: register, offset: 0, immediate: value }
    }

    const fn jump(code: u8, register: u8, value: u32, skip: i16) -> Self {
        Self { code, registers: register, offset: skip, immediate: value.cast_signed() }
    }
}

/// Calls of bpf(2). Each attribute is the beginning of `union bpf_attr` (`linux/bpf.h`) that the command reads.
mod bpf {
    use super::{AsRawFd, File, FromRawFd, Instruction, OwnedFd, io};

    const PROG_LOAD: i32 = 5;
    const PROG_ATTACH: i32 = 8;
    const PROG_GET_FD_BY_ID: i32 = 13;
    const OBJ_GET_INFO_BY_FD: i32 = 15;
    const PROG_QUERY: i32 = 16;
    /// `BPF_PROG_TYPE_CGROUP_DEVICE`.
    const PROGRAM_TYPE: u32 = 15;
    /// `BPF_CGROUP_DEVICE`.
    const ATTACH_TYPE: u32 = 6;
    /// `BPF_F_ALLOW_MULTI`: beside the runtime's program; each of them has to allow an access.
    const ALLOW_MULTI: u32 = 2;
    /// The most programs that the kernel lets a cgroup have (`BPF_CGROUP_MAX_PROGS`).
    const PROGRAMS_MAX: u32 = 64;

    #[repr(C)]
    #[derive(Default)]
    struct Load {
        program_type: u32,
        instruction_count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
    }

    #[repr(C)]
    struct Attach {
        target: u32,
        program: u32,
        attach_type: u32,
        flags: u32,
    }

    #[repr(C)]
    struct Query {
        target: u32,
        attach_type: u32,
        query_flags: u32,
        attach_flags: u32,
        ids: u64,
        count: u32,
        padding: u32,
        /// Flags by program, links, flags by link: not asked for.
        unused: [u64; 3],
        /// Kernels from 6.17 on write it, whatever the size of the attribute.
        revision: u64,
    }

    #[repr(C)]
    #[derive(Default)]
    struct ById {
        id: u32,
        next: u32,
        flags: u32,
    }

    #[repr(C)]
    struct InfoOf {
        object: u32,
        length: u32,
        info: u64,
    }

    /// The beginning of `struct bpf_prog_info`.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        program_type: u32,
        id: u32,
        tag: [u8; 8],
    }

    /// Lets the process load programs on kernels before 5.11, which count them against this limit.
    fn raise_memory_limit() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        // If this is not permitted, loading the program reports the error.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
    }

    /// Loads a program; it exists while the descriptor is open or it is attached.
    pub(super) fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
        raise_memory_limit();
        let license = c"Apache-2.0";
        let mut name = [0; 16];
        name[..13].copy_from_slice(b"berth_devices");
        let attribute = Load {
            program_type: PROGRAM_TYPE,
            instruction_count: u32::try_from(program.len()).map_err(io::Error::other)?,
            instructions: program.as_ptr().expose_provenance() as u64,
            license: license.as_ptr().expose_provenance() as u64,
            name,
            ..Load::default()
        };
        descriptor(call(PROG_LOAD, &mut { attribute })?)
    }

    /// Attaches a program to a cgroup, on which it stays when this process ends.
    pub(super) fn attach(cgroup: &File, program: &OwnedFd) -> io::Result<()> {
        let (target, program) = (number(cgroup.as_raw_fd())?, number(program.as_raw_fd())?);
        let attribute = Attach { target, program, attach_type: ATTACH_TYPE, flags: ALLOW_MULTI };
        call(PROG_ATTACH, &mut { attribute }).map(drop)
    }

    /// The ids of the programs of a cgroup.
    pub(super) fn attached(cgroup: &File) -> io::Result<Vec<u32>> {
        let mut ids = [0_u32; PROGRAMS_MAX as usize];
        let mut attribute = Query {
            target: number(cgroup.as_raw_fd())?,
            attach_type: ATTACH_TYPE,
            query_flags: 0,
            attach_flags: 0,
            ids: ids.as_mut_ptr().expose_provenance() as u64,
            count: PROGRAMS_MAX,
            padding: 0,
            unused: [0; 3],
            revision: 0,
        };
        call(PROG_QUERY, &mut attribute)?;
        Ok(ids.into_iter().take(attribute.count as usize).collect())
    }

    pub(super) fn by_id(id: u32) -> io::Result<OwnedFd> {
        descriptor(call(PROG_GET_FD_BY_ID, &mut ById { id, ..ById::default() })?)
    }

    /// The hash of a program's instructions.
    pub(super) fn tag(program: &OwnedFd) -> io::Result<[u8; 8]> {
        let mut info = Info::default();
        let mut attribute = InfoOf {
            object: number(program.as_raw_fd())?,
            length: u32::try_from(size_of::<Info>()).map_err(io::Error::other)?,
            info: (&raw mut info).expose_provenance() as u64,
        };
        call(OBJ_GET_INFO_BY_FD, &mut attribute)?;
        Ok(info.tag)
    }

    fn number(descriptor: i32) -> io::Result<u32> {
        u32::try_from(descriptor).map_err(io::Error::other)
    }

    fn descriptor(result: i64) -> io::Result<OwnedFd> {
        let raw = i32::try_from(result).map_err(io::Error::other)?;
        // SAFETY: the kernel has just opened this descriptor for the caller, and nothing else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    }

    fn call<T>(command: i32, attribute: &mut T) -> io::Result<i64> {
        // SAFETY: the attribute has the layout that the command reads, with its size; the pointers in it point to values of
        // the callers that outlive the call, and the kernel writes no more than the lengths beside them.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, attribute as *mut T, size_of::<T>()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};

    /// What the program returns, by the meaning of its few instructions in the kernel's documentation.
    fn run(program: &[Instruction], kind: u32, major: u32, minor: u32) -> i32 {
        let argument = [kind | 0x7_0000, major, minor];
        let (mut registers, mut at) = ([0_u32; 11], 0);
        loop {
            let Instruction { code, registers: both, offset, immediate } = program[at];
            let (to, value) = (usize::from(both & 15), immediate.cast_unsigned());
            at += 1;
            let skip = usize::try_from(offset).unwrap();
            match code {
                0x61 => registers[to] = argument[skip / 4],
                0x54 => registers[to] &= value,
                0xb7 => registers[to] = value,
                0x15 if registers[to] == value => at += skip,
                0x55 if registers[to] != value => at += skip,
                0x05 => at += skip,
                0x15 | 0x55 => {}
                0x95 => return registers[0].cast_signed(),
                _ => panic!("no such instruction: {code:x}"),
            }
        }
    }

    #[test]
    fn the_program_denies_these_devices_and_no_other() {
        let denied = DeniedDevices { majors: [7, 9].into(), all_but: Some((195, [1, 255].into())) };
        let program = denied.program();
        for (kind, major, minor, expected) in [
            (2, 7, 0, 0),
            (2, 9, 3, 0),
            (2, 195, 0, 0),
            (2, 195, 1, 1),
            (2, 195, 255, 1),
            (2, 1, 3, 1),
            (1, 7, 0, 1),
            (1, 195, 0, 1),
        ] {
            assert_eq!(run(&program, kind, major, minor), expected, "{kind} {major}:{minor}");
        }
    }

    #[test]
    fn v1_gets_a_rule_for_each_denied_minor() {
        let denied = DeniedDevices { majors: [7].into(), all_but: Some((195, [1].into())) };
        let rules = denied.v1_rules();
        assert_eq!((rules.len(), rules[0].as_str()), (1 + 256 + 255, "c 7:* rwm"));
        assert!(rules.contains(&"c 195:0 rwm".into()) && !rules.contains(&"c 195:1 rwm".into()));
        for (list, expected) in [
            ("a *:* rwm\n", true),
            ("c 1:3 rwm\nb 7:0 rwm\nc 195:1 rw\n", true),
            ("c 1:3 rwm\nc 7:0 rw\n", false),
            ("c 7:* m\n", false),
            ("c 195:* rwm\n", false),
            ("c 195:2 r\n", false),
        ] {
            assert_eq!(denied.check_v1(list).is_ok(), expected, "{list:?}");
        }
    }

    #[test]
    fn nothing_is_denied_without_a_driver() {
        DeniedDevices::default().apply_to(Path::new("/no such folder")).unwrap();
    }

    /// A cgroup of its own, deleted at the end; `None` where this process cannot make one.
    struct Cgroup(PathBuf);

    impl Cgroup {
        fn new(root: &str) -> Option<Self> {
            let folder = Path::new(root).join(format!("berth-test-{}", std::process::id()));
            fs::create_dir(&folder).ok()?;
            Some(Self(folder))
        }

        /// Whether a process in it can open the device.
        fn opens(&self, device: &str) -> bool {
            let script = format!("echo $$ > {}/cgroup.procs && exec 3< {device}", self.0.display());
            let mut shell = Command::new("sh");
            shell.args(["-c", &script]).stderr(Stdio::null());
            shell.status().unwrap().success()
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    #[test]
    fn the_kernel_refuses_the_open_of_a_denied_device() {
        // /dev/null is 1:3, /dev/zero 1:5, /dev/tty 5:0.
        let denied = DeniedDevices { majors: [5].into(), all_but: Some((1, [3].into())) };
        let mut tried = 0;
        for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/devices"] {
            let is_root = Path::new(root).join("cgroup.controllers").exists() || root.ends_with("devices");
            let Some(cgroup) = Cgroup::new(root).filter(|_| is_root) else { continue };
            assert!(cgroup.opens("/dev/zero"), "{root}");
            match denied.apply_to(&cgroup.0) {
                // A container without the right to use BPF.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
                result => result.unwrap_or_else(|error| panic!("{root}: {error}")),
            }
            // A cgroup to which single devices are allowed, as a container's is.
            let single = Cgroup(cgroup.0.join("single"));
            fs::create_dir(&single.0).unwrap();
            if root.ends_with("devices") {
                for (file, rule) in [("deny", "a"), ("allow", "c 1:3 rwm")] {
                    fs::write(single.0.join(format!("devices.{file}")), rule).unwrap();
                }
                let only = DeniedDevices { majors: [1].into(), all_but: None };
                assert!(single.opens("/dev/null"));
                only.apply_to(&single.0).unwrap();
            }
            assert!(!single.opens("/dev/zero"), "{root}");
            assert_eq!(single.opens("/dev/null"), !root.ends_with("devices"), "{root}");
            drop(single);
            // Once more is no other program.
            denied.apply_to(&cgroup.0).unwrap();
            if !root.ends_with("devices") {
                assert_eq!(bpf::attached(&File::open(&cgroup.0).unwrap()).unwrap().len(), 1, "{root}");
            }
            assert!(!cgroup.opens("/dev/zero") && !cgroup.opens("/dev/ptmx"), "{root}");
            assert!(cgroup.opens("/dev/null"), "{root}");
            tried += 1;
        }
        // None without root's rights, or where the cgroups are read-only.
        eprintln!("denied devices in {tried} hierarchies of cgroups");
    }
}
