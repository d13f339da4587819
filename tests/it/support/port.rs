//! Ports of 127.0.0.1 that stay reserved for a test while it does not listen on them.

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

/// A port that no other process gets by chance, for tests that need an address before a listener exists, after
/// that, or again. A socket that is bound and never listens reserves it: the system does not give it to a process that
/// requests any port, and refuses connections. A listener that names it may still bind it, one at a time: both
/// sockets have SO_REUSEADDR, the standard library's listeners always.
pub(crate) struct Port {
    address: SocketAddr,
    _holder: OwnedFd,
}

impl Port {
    pub(crate) fn held() -> Self {
        let holder =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        sockopt::set_socket_reuseaddr(&holder, true).unwrap();
        bind(&holder, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = SocketAddr::try_from(getsockname(&holder).unwrap()).unwrap();
        Self { address, _holder: holder }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

#[test]
fn an_endpoint_is_dialled_until_its_plugin_listens() {
    let port = Port::held();
    let kind = |message: std::io::Result<()>| message.map_err(|error| error.kind());
    let dialled = || kind(TcpStream::connect(port.address()).map(drop));
    for _ in 0..2 {
        assert_eq!(dialled(), Err(ErrorKind::ConnectionRefused));
        let listener = TcpListener::bind(port.address()).unwrap();
        assert_eq!(dialled(), Ok(()));
        assert_eq!(kind(TcpListener::bind(port.address()).map(drop)), Err(ErrorKind::AddrInUse));
        drop(listener);
    }
    // A request for any port gets another one, with or without a listener; so does each outgoing connection.
    let others: Vec<_> = (0..200).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    assert!(others.iter().all(|other| other.local_addr().unwrap() != port.address()));
}
