//! The HTTP library's service of a worker, which exists only while the worker has connections.
//!
//! The library starts a task with each service that updates the date of responses twice a second (actix-http,
//! `date.rs`), also while no client is connected. The application, which takes time to build, is built once for each
//! worker.

use actix_http::Request;
use actix_service::{Service, ServiceFactory, fn_factory};
use std::cell::RefCell;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// Services that create that of `http` for the application when a connection comes.
pub(crate) fn on_demand<Io, A, H>(
    application: A,
    http: impl Fn(SharedApplication<A::Service>) -> H + Clone + 'static,
) -> impl ServiceFactory<
    Io,
    Config = (),
    Response = H::Response,
    Error = (),
    InitError = (),
    Service = OnDemand<H, H::Service>,
>
where
    Io: 'static,
    A: ServiceFactory<Request, Config = ()> + 'static,
    A::Service: 'static,
    H: ServiceFactory<Io, Config = (), Error = (), InitError = ()> + 'static,
{
    fn_factory(move || {
        let (built, http) = (application.new_service(()), http.clone());
        async move {
            let application = Rc::new(built.await.map_err(drop)?);
            let new = move || http(SharedApplication(Rc::clone(&application)));
            Ok(OnDemand {
                new: Rc::new(new),
                current: Rc::new(RefCell::new(Current { service: None, users: 0 })),
            })
        }
    })
}

/// The application of a worker, which its successive services share.
pub(crate) struct SharedApplication<S>(Rc<S>);

impl<S: Service<Request> + 'static> ServiceFactory<Request> for SharedApplication<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Config = ();
    type Service = Rc<S>;
    type InitError = ();
    type Future = Ready<Result<Rc<S>, ()>>;

    fn new_service(&self, (): ()) -> Self::Future {
        ready(Ok(Rc::clone(&self.0)))
    }
}

/// See the module.
pub(crate) struct OnDemand<H, S> {
    new: Rc<dyn Fn() -> H>,
    current: Rc<RefCell<Current<S>>>,
}

struct Current<S> {
    service: Option<Rc<S>>,
    /// Its connections.
    users: usize,
}

/// A connection of a service. The last one ends the service with it.
struct User<S>(Rc<RefCell<Current<S>>>);

impl<S> User<S> {
    fn new(current: &Rc<RefCell<Current<S>>>) -> Self {
        current.borrow_mut().users += 1;
        Self(Rc::clone(current))
    }
}

impl<S> Drop for User<S> {
    fn drop(&mut self) {
        let mut current = self.0.borrow_mut();
        current.users -= 1;
        let ended = if current.users == 0 { current.service.take() } else { None };
        // Dropped after the borrow, since that runs the library's code.
        drop(current);
        drop(ended);
    }
}

impl<Io, H> Service<Io> for OnDemand<H, H::Service>
where
    Io: 'static,
    H: ServiceFactory<Io, Config = (), Error = (), InitError = ()> + 'static,
{
    type Response = H::Response;
    type Error = ();
    type Future = Pin<Box<dyn Future<Output = Result<H::Response, ()>>>>;

    fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<Result<(), ()>> {
        let service = self.current.borrow().service.clone();
        service.map_or(Poll::Ready(Ok(())), |service| service.poll_ready(cx))
    }

    fn call(&self, io: Io) -> Self::Future {
        let (user, new) = (User::new(&self.current), Rc::clone(&self.new));
        Box::pin(async move {
            let known = user.0.borrow().service.clone();
            let service = match known {
                Some(service) => service,
                None => {
                    let created = Rc::new(new().new_service(()).await?);
                    Rc::clone(user.0.borrow_mut().service.get_or_insert(created))
                }
            };
            service.call(io).await
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_service::fn_service;
    use actix_web::rt;
    use std::cell::Cell;
    use std::convert::Infallible;

    /// Counts the services that exist.
    struct Counted {
        now: Rc<Cell<usize>>,
        created: Rc<Cell<usize>>,
    }

    struct Connections(Rc<Cell<usize>>);

    impl ServiceFactory<tokio::sync::oneshot::Receiver<()>> for Counted {
        type Response = ();
        type Error = ();
        type Config = ();
        type Service = Connections;
        type InitError = ();
        type Future = Ready<Result<Connections, ()>>;

        fn new_service(&self, (): ()) -> Self::Future {
            self.now.set(self.now.get() + 1);
            self.created.set(self.created.get() + 1);
            ready(Ok(Connections(Rc::clone(&self.now))))
        }
    }

    impl Drop for Connections {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    impl Service<tokio::sync::oneshot::Receiver<()>> for Connections {
        type Response = ();
        type Error = ();
        type Future = Pin<Box<dyn Future<Output = Result<(), ()>>>>;

        fn poll_ready(&self, _: &mut Context<'_>) -> Poll<Result<(), ()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&self, closed: tokio::sync::oneshot::Receiver<()>) -> Self::Future {
            Box::pin(async move { closed.await.map_err(drop) })
        }
    }

    #[test]
    fn a_service_exists_while_it_has_connections() {
        let (now, created) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let application = fn_service(|_: Request| ready(Ok::<_, Infallible>(())));
        let http = {
            let (now, created) = (Rc::clone(&now), Rc::clone(&created));
            move |_| Counted { now: Rc::clone(&now), created: Rc::clone(&created) }
        };
        rt::System::new().block_on(async {
            let service = on_demand(application, http).new_service(()).await.unwrap();
            assert_eq!(now.get(), 0);
            for round in 1..=2 {
                let (ends, connections): (Vec<_>, Vec<_>) = (0..3)
                    .map(|_| {
                        let (end, closed) = tokio::sync::oneshot::channel();
                        (end, rt::spawn(service.call(closed)))
                    })
                    .unzip();
                tokio::task::yield_now().await;
                assert_eq!((now.get(), created.get()), (1, round));
                for (end, connection) in ends.into_iter().zip(connections) {
                    assert_eq!(now.get(), 1);
                    end.send(()).unwrap();
                    connection.await.unwrap().unwrap();
                }
                assert_eq!(now.get(), 0);
            }
        });
    }
}
