//! CUDA by the driver library alone, without a toolkit: `libcuda.so.1` is opened by name, and the kernels are text that
//! the driver compiles (PTX). Each use is a process of its own.
#![allow(unsafe_code, reason = "calls of CUDA's driver API through the symbol table")]

use anyhow::{Context as _, bail, ensure};
use libloading::{Library, Symbol};
use serde::{Deserialize, Serialize};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::ptr;

/// `add` adds two vectors; `store` writes to the address that it is given. For GPUs from compute capability 5.0 on.
const KERNELS: &CStr = cr"
.version 6.0
.target sm_50
.address_size 64

.visible .entry add(
    .param .u64 first,
    .param .u64 second,
    .param .u64 sum,
    .param .u32 count
)
{
    .reg .pred %beyond;
    .reg .f32 %x, %y, %z;
    .reg .b32 %block, %width, %thread, %index, %count;
    .reg .b64 %first, %second, %sum, %offset;

    ld.param.u64 %first, [first];
    ld.param.u64 %second, [second];
    ld.param.u64 %sum, [sum];
    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %width, %thread;
    setp.ge.u32 %beyond, %index, %count;
    @%beyond bra END;
    cvta.to.global.u64 %first, %first;
    cvta.to.global.u64 %second, %second;
    cvta.to.global.u64 %sum, %sum;
    mul.wide.u32 %offset, %index, 4;
    add.u64 %first, %first, %offset;
    add.u64 %second, %second, %offset;
    add.u64 %sum, %sum, %offset;
    ld.global.f32 %x, [%first];
    ld.global.f32 %y, [%second];
    add.f32 %z, %x, %y;
    st.global.f32 [%sum], %z;
END:
    ret;
}

.visible .entry store(
    .param .u64 address
)
{
    .reg .b32 %value;
    .reg .b64 %address;

    ld.param.u64 %address, [address];
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
";

/// Elements of the vectors that are added.
const COUNT: u32 = 1 << 20;
const BLOCK: u32 = 256;
const MIB: usize = 1024 * 1024;

type Device = c_int;
type Context = *mut c_void;
type Module = *mut c_void;
type Function = *mut c_void;
type Pointer = u64;

/// The opened library and the device's primary context, which is current in this thread.
struct Cuda {
    library: Library,
    uuid: String,
}

/// The paths under which `libcuda.so.1` is looked for: as given, by the loader, beside NVML.
pub(crate) fn candidates(given: Option<&Path>, nvml: &Path) -> Vec<PathBuf> {
    const NAME: &str = "libcuda.so.1";
    if let Some(given) = given {
        return vec![given.to_owned()];
    }
    let beside = nvml.parent().filter(|folder| *folder != Path::new(""));
    let beside = beside.map(|folder| folder.join(NAME)).filter(|path| path.exists());
    [PathBuf::from(NAME)].into_iter().chain(beside).collect()
}

/// `call!(library, name(argument => type, ...))`: one call of the driver API, an error with its name if it fails. The
/// arguments are valid: handles come from CUDA, pointers lead to values of this frame.
macro_rules! call {
    ($library:expr, $name:ident ( $($argument:expr => $type:ty),* )) => {
        // SAFETY: the type is that of cuda.h for this name; the arguments: see the macro's comment.
        unsafe {
            let name = concat!(stringify!($name), "\0");
            let symbol: Result<Symbol<'_, unsafe extern "C" fn($($type),*) -> c_uint>, _> = $library.get(name.as_bytes());
            match symbol {
                Ok(function) => check($library, stringify!($name), function($($argument),*)),
                Err(error) => Err(error.into()),
            }
        }
    };
}

/// An error with CUDA's own name for it.
fn check(library: &Library, call: &str, code: c_uint) -> anyhow::Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut name: *const c_char = ptr::null();
    // SAFETY: the type is that of cuda.h; the name that it writes is a constant of the library.
    let name = unsafe {
        let function: Symbol<'_, unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint> =
            library.get(b"cuGetErrorName\0")?;
        let known = function(code, &raw mut name) == 0 && !name.is_null();
        known.then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    };
    bail!("{call}: {} ({code})", name.unwrap_or_default())
}

impl Cuda {
    /// Opens the first library that can be opened, and device 0.
    fn open(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut opened = Err(anyhow::anyhow!("no path of libcuda.so.1"));
        for path in paths {
            // SAFETY: the library is CUDA's, whose initialisers have no preconditions.
            opened = unsafe { Library::new(path) }.with_context(|| path.display().to_string());
            if opened.is_ok() {
                break;
            }
        }
        let library = opened?;
        call!(&library, cuInit(0 => c_uint))?;
        let (mut device, mut context): (Device, Context) = (0, ptr::null_mut());
        call!(&library, cuDeviceGet(&raw mut device => *mut Device, 0 => c_int))?;
        let mut uuid = [0_u8; 16];
        call!(&library, cuDeviceGetUuid(uuid.as_mut_ptr() => *mut u8, device => Device))?;
        call!(&library, cuDevicePrimaryCtxRetain(&raw mut context => *mut Context, device => Device))?;
        call!(&library, cuCtxSetCurrent(context => Context))?;
        Ok(Self { library, uuid: uuid_text(&uuid) })
    }

    fn allocate(&self, bytes: usize) -> anyhow::Result<Pointer> {
        let mut pointer: Pointer = 0;
        call!(&self.library, cuMemAlloc_v2(&raw mut pointer => *mut Pointer, bytes => usize))?;
        Ok(pointer)
    }

    fn function(&self, name: &CStr) -> anyhow::Result<Function> {
        let (mut module, mut function): (Module, Function) = (ptr::null_mut(), ptr::null_mut());
        let text = KERNELS.as_ptr().cast::<c_void>();
        call!(&self.library, cuModuleLoadData(&raw mut module => *mut Module, text => *const c_void))?;
        call!(&self.library, cuModuleGetFunction(&raw mut function => *mut Function, module => Module, name.as_ptr() => *const c_char))?;
        Ok(function)
    }

    /// Launches a kernel and waits for its end.
    fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> anyhow::Result<()> {
        call!(&self.library, cuLaunchKernel(
            function => Function, blocks => c_uint, 1 => c_uint, 1 => c_uint, threads => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, ptr::null_mut() => *mut c_void, arguments.as_mut_ptr() => *mut *mut c_void,
            ptr::null_mut() => *mut *mut c_void
        ))?;
        call!(&self.library, cuCtxSynchronize())
    }
}

/// The UUID as NVML writes it.
fn uuid_text(bytes: &[u8; 16]) -> String {
    let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex[range].concat());
    format!("GPU-{}", parts.join("-"))
}

/// Opens CUDA and returns the UUID of device 0. In MIG mode it is that of the GPU, not of the instance.
pub(crate) fn uuid(paths: &[PathBuf]) -> anyhow::Result<String> {
    Cuda::open(paths).map(|cuda| cuda.uuid)
}

/// Allocates so many MiB, prints the GPU's UUID when that is done, and holds them until standard input ends.
pub(crate) fn hold(paths: &[PathBuf], mib: usize) -> anyhow::Result<()> {
    let cuda = Cuda::open(paths)?;
    cuda.allocate(mib * MIB)?;
    println!("{}", cuda.uuid);
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// What a process with a limit of memory has seen.
#[derive(Deserialize, Serialize)]
pub(crate) struct Limited {
    /// The GPU's memory as CUDA shows it.
    pub(crate) total_mib: u64,
    /// The error of the allocation that does not fit; `None`: there was none.
    pub(crate) refusal: Option<String>,
}

/// Reads the GPU's memory, allocates what fits into the limit, frees it, and tries to allocate what does not fit.
///
/// # Errors
/// If what fits cannot be allocated.
pub(crate) fn limited(paths: &[PathBuf], fits_mib: usize, exceeds_mib: usize) -> anyhow::Result<Limited> {
    let cuda = Cuda::open(paths)?;
    let (mut free, mut total) = (0_usize, 0_usize);
    call!(&cuda.library, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize))?;
    let pointer = cuda.allocate(fits_mib * MIB).with_context(|| format!("allocating {fits_mib} MiB"))?;
    call!(&cuda.library, cuMemFree_v2(pointer => Pointer))?;
    let refusal = cuda.allocate(exceeds_mib * MIB).err().map(|error| format!("{error:#}"));
    Ok(Limited { total_mib: u64::try_from(total / MIB)?, refusal })
}

/// Writes to address 0, and returns the error that CUDA then has to report.
///
/// # Errors
/// If there is no error.
pub(crate) fn fault(paths: &[PathBuf]) -> anyhow::Result<String> {
    let cuda = Cuda::open(paths)?;
    let function = cuda.function(c"store")?;
    let mut address: Pointer = 0;
    let launched = cuda.launch(function, 1, 1, &mut [(&raw mut address).cast()]);
    match launched {
        Err(error) => Ok(format!("{} {error:#}", cuda.uuid)),
        Ok(()) => bail!("CUDA reported no error of a write to address 0"),
    }
}

/// Adds two vectors and checks the sums.
pub(crate) fn add(paths: &[PathBuf]) -> anyhow::Result<()> {
    let cuda = Cuda::open(paths)?;
    let function = cuda.function(c"add")?;
    let count = usize::try_from(COUNT)?;
    let bytes = count * size_of::<f32>();
    #[allow(clippy::cast_precision_loss, reason = "whole numbers below 2^24 are exact")]
    let numbers: Vec<f32> = (0..COUNT).map(|n| n as f32).collect();
    let (mut first, mut second, mut sum) =
        (cuda.allocate(bytes)?, cuda.allocate(bytes)?, cuda.allocate(bytes)?);
    for pointer in [first, second] {
        let source = numbers.as_ptr().cast::<c_void>();
        call!(&cuda.library, cuMemcpyHtoD_v2(pointer => Pointer, source => *const c_void, bytes => usize))?;
    }
    let mut length = COUNT;
    let mut arguments: [*mut c_void; 4] =
        [(&raw mut first).cast(), (&raw mut second).cast(), (&raw mut sum).cast(), (&raw mut length).cast()];
    cuda.launch(function, COUNT / BLOCK, BLOCK, &mut arguments)?;
    let mut sums = vec![0_f32; count];
    call!(&cuda.library, cuMemcpyDtoH_v2(sums.as_mut_ptr().cast() => *mut c_void, sum => Pointer, bytes => usize))?;
    let wrong = sums.iter().zip(&numbers).filter(|(sum, number)| **sum != **number + **number).count();
    ensure!(wrong == 0, "{wrong} of {COUNT} sums are wrong");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let bytes =
            [0x8a, 0x56, 0xa4, 0xbc, 0xe1, 0x84, 0xa0, 0x47, 0x26, 0x20, 0xbe, 0x19, 0xfd, 0xf9, 0x13, 0xd5];
        assert_eq!(uuid_text(&bytes), "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5");
    }

    #[test]
    fn a_missing_library_is_an_error_with_its_path() {
        let error = format!("{:#}", uuid(&["/nowhere/libcuda.so.1".into()]).unwrap_err());
        assert!(error.contains("/nowhere/libcuda.so.1"), "{error}");
    }

    #[test]
    fn cuda_is_looked_for_beside_nvml() {
        let folder = tempfile::tempdir().unwrap();
        let cuda = folder.path().join("libcuda.so.1");
        let nvml = folder.path().join("libnvidia-ml.so.1");
        assert_eq!(candidates(None, &nvml), [PathBuf::from("libcuda.so.1")]);
        std::fs::write(&cuda, "").unwrap();
        assert_eq!(candidates(None, &nvml), [PathBuf::from("libcuda.so.1"), cuda]);
        assert_eq!(candidates(Some(Path::new("/x")), &nvml), [PathBuf::from("/x")]);
    }
}
