//! How many GPUs there are, and the handle of one.

use std::ffi::c_uint;

use crate::code::{Answer, Code};
use crate::gpu::{Gpu, pci_address};
use crate::runtime::call;
use crate::runtime::handle::Handle;
use crate::runtime::pointer::{InText, Out};
use crate::state::State;

fn count(state: &State, count: Out<c_uint>) -> Answer {
    count.put(c_uint::try_from(state.gpus.len()).map_err(|_| Code::Unknown)?)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount(out: Out<c_uint>) -> c_uint {
    call::system("nvmlDeviceGetCount", |state| count(state, out))
}

/// Lost GPUs count, as in NVML: indices do not move when a GPU falls off the bus.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(out: Out<c_uint>) -> c_uint {
    call::system("nvmlDeviceGetCount_v2", |state| count(state, out))
}

fn find(symbol: &str, out: Out<Handle>, missing: Code, chosen: impl Fn(&(usize, &Gpu)) -> bool) -> c_uint {
    call::lookup(
        symbol,
        |state| {
            out.checked()?;
            let found = state.gpus.iter().enumerate().find(&chosen);
            found.map(|(_, gpu)| gpu.uuid.clone()).ok_or(missing)
        },
        |device| out.put(Handle::of_device(&device.gpu.uuid)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<Handle>) -> c_uint {
    find("nvmlDeviceGetHandleByIndex", out, Code::InvalidArgument, |(at, _)| *at == index as usize)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Handle>) -> c_uint {
    find("nvmlDeviceGetHandleByIndex_v2", out, Code::InvalidArgument, |(at, _)| *at == index as usize)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleBySerial(serial: InText, out: Out<Handle>) -> c_uint {
    let asked = serial.get();
    find("nvmlDeviceGetHandleBySerial", out, missing(&asked), |(_, gpu)| {
        gpu.serial.is_some() && gpu.serial == asked.clone().ok()
    })
}

/// By UUID of a GPU, or of a MIG device.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByUUID(uuid: InText, out: Out<Handle>) -> c_uint {
    call::lookup(
        "nvmlDeviceGetHandleByUUID",
        |state| {
            out.checked()?;
            let uuid = uuid.get()?;
            call::find(state, &uuid).map(|_| uuid).ok_or(Code::NotFound)
        },
        |device| {
            let uuid = device.mig.map_or(&device.gpu.uuid, |(_, instance)| &instance.uuid);
            out.put(Handle::of_device(uuid))
        },
    )
}

fn by_bus_id(symbol: &str, bus_id: InText, out: Out<Handle>) -> c_uint {
    let asked = bus_id.get();
    let address = asked.clone().ok().and_then(|text| pci_address(&text));
    find(symbol, out, missing(&asked), |(_, gpu)| address.is_some() && gpu.pci_address() == address)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId(bus_id: InText, out: Out<Handle>) -> c_uint {
    by_bus_id("nvmlDeviceGetHandleByPciBusId", bus_id, out)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: InText, out: Out<Handle>) -> c_uint {
    by_bus_id("nvmlDeviceGetHandleByPciBusId_v2", bus_id, out)
}

/// A text that could be read names a GPU that is not there; NULL is a mistake.
fn missing(asked: &Answer<String>) -> Code {
    asked.as_ref().err().copied().unwrap_or(Code::NotFound)
}
