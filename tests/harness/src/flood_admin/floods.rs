//! The floods. Each opens what it may, holds it for some seconds, and says what came of it.

use crate::flood_admin::connections::{From, crowd, open, status, trickle};
use crate::flood_admin::node::Target;
use anyhow::{Context, ensure};
use futures_util::future::{BoxFuture, FutureExt, join_all};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};

/// A flood.
pub(crate) struct Flood {
    pub(crate) name: &'static str,
    /// Of a node that speaks TLS.
    pub(crate) tls: bool,
    pub(crate) run: fn(Target, usize) -> BoxFuture<'static, anyhow::Result<String>>,
}

macro_rules! floods {
    ($($tls:literal $name:literal $run:ident,)*) => {
        /// All of them.
        pub(crate) const FLOODS: &[Flood] =
            &[$(Flood { name: $name, tls: $tls, run: |target, most| $run(target, most).boxed() }),*];
    };
}

floods! {
    false "silent" silent,
    false "silent, own address" silent_neighbours,
    false "churn" churn,
    false "heads, a byte a second" slow_heads,
    false "second heads, a byte a second" slow_second_heads,
    false "heads of 127 KiB, unended" large_heads,
    false "bodies that never come" slow_bodies,
    false "a gigabyte" gigabytes,
    false "crumbs of chunks" crumbs,
    false "unread responses" unread,
    false "unread lists" unread_lists,
    false "unread modules" unread_modules,
    false "10,000 requests in one go" pipelines,
    false "idle streams" streams,
    false "idle keep-alive" keep_alive,
    false "malformed" malformed,
    false "wrong tokens" wrong_tokens,
    false "refused uploads" refused_uploads,
    false "health: silent and slow" health,
    false "socket: silent" socket,
    true "tls: silent" silent,
    true "tls: hello begun" hello_begun,
    true "tls: hello, and no more" hello_alone,
    true "tls: plain HTTP" plain,
    true "tls: idle sessions" idle_sessions,
    true "tls: unread responses" unread_sessions,
}

/// A crowd is held for so long: longer than a silent one lives.
const HELD: Duration = Duration::from_secs(8);
/// A crowd of those that cost more.
const SOME: usize = 1_000;

async fn hold(crowd: Vec<TcpStream>) -> anyhow::Result<String> {
    let (all, at_first) = (crowd.len(), open(&crowd));
    sleep(HELD).await;
    Ok(format!("{all} connected, {at_first} open, {} after {} s", open(&crowd), HELD.as_secs()))
}

async fn silent(target: Target, most: usize) -> anyhow::Result<String> {
    hold(crowd(From::Many(200), target.admin, most, |_| Vec::new()).await).await
}

async fn silent_neighbours(target: Target, most: usize) -> anyhow::Result<String> {
    hold(crowd(From::Same, target.admin, most / 4, |_| Vec::new()).await).await
}

async fn churn(target: Target, _: usize) -> anyhow::Result<String> {
    let end = Instant::now() + HELD;
    let one = |worker: usize| async move {
        let mut count = 0;
        while Instant::now() < end {
            if let Ok(stream) = From::Many(200).connect(target.admin, worker * 7 + count).await {
                // A reset: nothing of it waits in the system.
                let _ = stream.set_zero_linger();
                count += 1;
            }
        }
        count
    };
    Ok(format!("{} connections", join_all((0..8).map(one)).await.iter().sum::<usize>()))
}

async fn slow_heads(target: Target, _: usize) -> anyhow::Result<String> {
    let begun = |_| b"GET /livez HTTP/1.1\r\nX-A: ".to_vec();
    let mut crowd = crowd(From::Many(200), target.admin, SOME, begun).await;
    trickle(&mut crowd, 12).await;
    let left = open(&crowd);
    ensure!(left == 0, "{left} are still open");
    Ok("none open after 12 s".into())
}

/// The library has a deadline for the first head alone.
async fn slow_second_heads(target: Target, _: usize) -> anyhow::Result<String> {
    let first = |_| b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /livez HTTP/1.1\r\nX-A: ".to_vec();
    let mut crowd = crowd(From::Many(100), target.admin, 200, first).await;
    let at_first = open(&crowd);
    trickle(&mut crowd, 42).await;
    let left = open(&crowd);
    ensure!(left == 0, "{left} of {at_first} are still open after 42 s");
    Ok(format!("{at_first} were served once; none open after 42 s"))
}

async fn large_heads(target: Target, _: usize) -> anyhow::Result<String> {
    let head = |_| format!("GET /livez HTTP/1.1\r\nX-A: {}", "a".repeat(127 * 1024)).into_bytes();
    hold(crowd(From::Many(200), target.admin, SOME, head).await).await
}

async fn slow_bodies(target: Target, _: usize) -> anyhow::Result<String> {
    let path = format!("/api/v1/gpus/{}/cordon", target.gpu);
    let headers = "Content-Type: application/json\r\nContent-Length: 250000\r\n";
    let known = target.request("PUT", &path, headers, &"a".repeat(200_000));
    let stranger = Target { token: "wrong".into(), ..target.clone() }.request("PUT", &path, headers, "{");
    let both = |n: usize| if n.is_multiple_of(2) { known.clone() } else { stranger.clone() };
    let mut crowd = crowd(From::Many(200), target.admin, SOME, both).await;
    trickle(&mut crowd, 14).await;
    let left = open(&crowd);
    ensure!(left == 0, "{left} are still open");
    Ok("none open after 14 s".into())
}

async fn gigabytes(target: Target, _: usize) -> anyhow::Result<String> {
    const GIB: usize = 1 << 30;
    let to = |token: &str, length: &str| {
        let headers = format!("Content-Type: application/wasm\r\n{length}\r\n");
        Target { token: token.into(), ..target.clone() }.request("POST", "/api/v1/policies", &headers, "")
    };
    let (declared, chunked) = (format!("Content-Length: {GIB}"), "Transfer-Encoding: chunked".to_owned());
    let mut heads = Vec::new();
    for length in [&declared, &chunked] {
        heads.extend([to(&target.token, length), to("wrong", length)]);
    }
    let mut chunk = b"100000\r\n".to_vec();
    chunk.extend(vec![b'x'; 1 << 20]);
    chunk.extend(b"\r\n");
    let (chunk, admin) = (&chunk, target.admin);
    let one = |(n, head): (usize, Vec<u8>)| async move {
        let mut stream = From::Many(16).connect(admin, n).await?;
        stream.write_all(&head).await?;
        let (mut sent, began) = (0, Instant::now());
        while sent < GIB {
            match timeout(Duration::from_secs(5), stream.write(chunk)).await {
                Ok(Ok(n)) => sent += n,
                _ => break,
            }
        }
        anyhow::Ok((began.elapsed().as_millis(), sent >> 20))
    };
    let all = heads.iter().cycle().take(16).cloned().enumerate().map(one);
    let ended: Vec<(u128, usize)> = join_all(all).await.into_iter().collect::<Result<_, _>>()?;
    let (slowest, most) = ended.iter().max().copied().unwrap_or_default();
    // A client that was answered may still send for half a second; that data is discarded.
    ensure!(slowest < 10_000, "a body was read for {slowest} ms");
    Ok(format!("the slowest had {slowest} ms, and sent {most} MiB"))
}

async fn crumbs(target: Target, _: usize) -> anyhow::Result<String> {
    let path = format!("/api/v1/gpus/{}/cordon", target.gpu);
    let headers = "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n";
    let head = target.request("PUT", &path, headers, "");
    let kinds = ["1\r\nx\r\n".repeat(10_000), "1;aaaaaaaaaaaaaaaa".to_owned() + &"a".repeat(60_000)];
    let (head, kinds, end) = (&head, &kinds, Instant::now() + HELD);
    let one = |n: usize| async move {
        let mut stream = From::Many(50).connect(target.admin, n).await?;
        stream.write_all(head).await?;
        let mut sent = 0;
        while Instant::now() < end {
            match timeout(Duration::from_secs(2), stream.write(kinds[n % 2].as_bytes())).await {
                Ok(Ok(n)) => sent += n,
                _ => break,
            }
        }
        anyhow::Ok(sent >> 10)
    };
    let sent: Vec<usize> = join_all((0..50).map(one)).await.into_iter().flatten().collect();
    Ok(format!("at most {} KiB of each were sent", sent.iter().max().copied().unwrap_or_default()))
}

async fn unread(target: Target, _: usize) -> anyhow::Result<String> {
    let each = ["/openapi.json", "/", "/swagger-ui/swagger-ui-bundle.js"];
    let ask = |n: usize| {
        let packed = if n.is_multiple_of(2) { "Accept-Encoding: gzip\r\n" } else { "" };
        format!("GET {} HTTP/1.1\r\nHost: localhost\r\n{packed}\r\n", each[n % 3]).repeat(40).into_bytes()
    };
    hold_unread(&target, ask).await
}

async fn unread_lists(target: Target, _: usize) -> anyhow::Result<String> {
    // As long as they may be.
    let lists = ["decisions?limit=500", "allocations?limit=1000&state=all", "policies", "gpus"];
    let ask = |n: usize| {
        let packed = if n % 8 < 4 { "Accept-Encoding: gzip\r\n" } else { "" };
        target.request("GET", &format!("/api/v1/{}", lists[n % 4]), packed, "").repeat(40)
    };
    hold_unread(&target, ask).await
}

/// The largest answers that there are, to clients with little room for what comes.
async fn unread_modules(target: Target, _: usize) -> anyhow::Result<String> {
    let digest = upload_large(&target).await.context("no large policy")?;
    let ask = |_| target.request("GET", &format!("/api/v1/policies/{digest}/module"), "", "").repeat(4);
    let result = hold_unread(&target, ask).await;
    // Those that come now and then must have it whole, if they read.
    let begun = Instant::now();
    let mut stream = From::Same.connect(target.admin, 0).await?;
    let one =
        target.request("GET", &format!("/api/v1/policies/{digest}/module"), "Connection: close\r\n", "");
    stream.write_all(&one).await?;
    let mut whole = Vec::new();
    timeout(Duration::from_secs(30), stream.read_to_end(&mut whole)).await.context("a reader waits")??;
    let head = String::from_utf8_lossy(&whole[..whole.len().min(12)]).into_owned();
    // Its own share of the memory may be spent, which says 503.
    let good = head.ends_with("503") || head.ends_with("200") && whole.len() > LARGE_BYTES;
    ensure!(good, "a reader had {} bytes: {head}", whole.len());
    Ok(format!("{}; a reader {} after {} ms", result?, &head[9..], begun.elapsed().as_millis()))
}

/// A policy almost as large as may be, most of it a custom section.
const LARGE_BYTES: usize = 31 << 20;

async fn upload_large(target: &Target) -> anyhow::Result<String> {
    let mut module = include_bytes!("../../../../policies-wasm/prebuilt/spread.wasm").to_vec();
    let name = b"\x04bulk";
    // A custom section: 0, its size as LEB128 in five bytes, its name, and what it likes.
    module.push(0);
    let mut left = name.len() + LARGE_BYTES;
    for _ in 0..4 {
        module.push(u8::try_from(left & 0x7f)? | 0x80);
        left >>= 7;
    }
    module.push(u8::try_from(left)?);
    module.extend(name);
    module.resize(module.len() + LARGE_BYTES, 7);
    let headers = format!(
        "Content-Type: application/wasm\r\nConnection: close\r\nContent-Length: {}\r\n",
        module.len()
    );
    let mut stream = From::Same.connect(target.admin, 0).await?;
    stream.write_all(&target.request("POST", "/api/v1/policies", &headers, "")).await?;
    stream.write_all(&module).await?;
    let mut answer = Vec::new();
    timeout(Duration::from_secs(90), stream.read_to_end(&mut answer)).await??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let shown: serde_json::Value = serde_json::from_str(body).with_context(|| head.to_owned())?;
    Ok(shown["digest"].as_str().with_context(|| body.to_owned())?.to_owned())
}

async fn hold_unread(target: &Target, ask: impl Fn(usize) -> Vec<u8>) -> anyhow::Result<String> {
    let crowd = crowd(From::Narrow(200), target.admin, SOME, ask).await;
    sleep(HELD).await;
    Ok(format!("{} asked", crowd.len()))
}

async fn pipelines(target: Target, _: usize) -> anyhow::Result<String> {
    let one = |n: usize| async move {
        // Answers without a body are those that nothing but the connection itself holds back.
        let condition = if n.is_multiple_of(2) { "If-None-Match: *\r\n" } else { "" };
        let request = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{condition}\r\n");
        let mut stream = From::Many(64).connect(target.admin, n).await?;
        let _ = timeout(HELD, stream.write_all(request.repeat(10_000).as_bytes())).await;
        sleep(HELD).await;
        anyhow::Ok(stream)
    };
    let crowd: Vec<_> = join_all((0..64).map(one)).await.into_iter().flatten().collect();
    ensure!(!crowd.is_empty(), "none was connected");
    Ok(format!("{} connections", crowd.len()))
}

async fn streams(target: Target, most: usize) -> anyhow::Result<String> {
    let crowd =
        crowd(From::Many(200), target.admin, most, |_| target.request("GET", "/api/v1/events", "", "")).await;
    hold(crowd).await
}

async fn keep_alive(target: Target, most: usize) -> anyhow::Result<String> {
    let ask = |_| b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    hold(crowd(From::Many(200), target.admin, most, ask).await).await
}

async fn malformed(target: Target, _: usize) -> anyhow::Result<String> {
    let host = "Host: localhost\r\n";
    let kinds = [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\u{2}\0".repeat(100),
        "\0".repeat(2_000),
        "A".repeat(150_000),
        format!("GET /livez HTTP/1.1\r\n{host}{}\r\n", "X-A: b\r\n".repeat(97)),
        format!(
            "PUT /livez HTTP/1.1\r\n{host}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ),
        format!("PUT /livez HTTP/1.1\r\n{host}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}"),
        format!("GET /%ff%00 HTTP/1.1\r\n{host}\r\n"),
    ];
    let end = Instant::now() + HELD;
    let kinds = &kinds;
    let one = |worker: usize| async move {
        let (mut count, mut successes) = (0, 0);
        while Instant::now() < end {
            let Ok(mut stream) = From::Many(200).connect(target.admin, worker + count).await else {
                continue;
            };
            let _ = timeout(HELD, stream.write_all(kinds[count % kinds.len()].as_bytes())).await;
            let answered = status(&mut stream).await;
            successes += usize::from(answered.is_some_and(|status| !(400..500).contains(&status)));
            count += 1;
        }
        (count, successes)
    };
    let all = join_all((0..32).map(one)).await;
    let successes: usize = all.iter().map(|(_, successes)| successes).sum();
    ensure!(successes == 0, "{successes} were answered with something else than 4xx");
    Ok(format!("{} requests", all.iter().map(|(count, _)| count).sum::<usize>()))
}

async fn wrong_tokens(target: Target, _: usize) -> anyhow::Result<String> {
    let target = &target;
    let one = |worker: usize| async move {
        let mut stream = From::Many(16).connect(target.admin, worker).await?;
        let (mut counts, mut others) = ([0, 0], 0);
        for n in 0..1_500 {
            let stranger = Target { token: format!("{worker}-{n}-{}", "x".repeat(64)), ..target.clone() };
            let head = stranger.request("GET", "/api/v1/node", "", "");
            stream.write_all(&head).await?;
            match status(&mut stream).await {
                Some(401) => counts[0] += 1,
                Some(429) => counts[1] += 1,
                _ => others += 1,
            }
        }
        anyhow::Ok((counts, others))
    };
    let all: Vec<_> = join_all((0..16).map(one)).await.into_iter().collect::<Result<_, _>>()?;
    let sum = |of: fn(&([i32; 2], i32)) -> i32| all.iter().map(of).sum::<i32>();
    let (refused, too_many, others) = (sum(|one| one.0[0]), sum(|one| one.0[1]), sum(|one| one.1));
    ensure!(others == 0, "{others} were answered with neither 401 nor 429");
    ensure!(too_many > 0, "no response was 429");
    Ok(format!("{refused} times 401, {too_many} times 429"))
}

async fn refused_uploads(target: Target, _: usize) -> anyhow::Result<String> {
    let target = &target;
    let one = |worker: usize| async move {
        let mut stream = From::Many(8).connect(target.admin, worker).await?;
        let mut refused = 0;
        for _ in 0..625 {
            // A 429 is sent before the body is read, and ends the connection.
            let headers = "Content-Type: application/wasm\r\nContent-Length: 8\r\n";
            let upload = target.request("POST", "/api/v1/policies", headers, "\0asmnone");
            let sent = stream.write_all(&upload).await;
            let answered = status(&mut stream).await;
            if sent.is_err() || answered.is_none_or(|status| status == 429) {
                stream = From::Many(8).connect(target.admin, worker).await?;
            }
            refused += usize::from(matches!(answered, Some(400..=499)));
        }
        anyhow::Ok(refused)
    };
    let refused: Vec<usize> = join_all((0..8).map(one)).await.into_iter().collect::<Result<_, _>>()?;
    let refused = refused.iter().sum::<usize>();
    ensure!(refused > 0, "no upload was refused");
    Ok(format!("{refused} of 5000 refused"))
}

async fn health(target: Target, _: usize) -> anyhow::Result<String> {
    let says = |n: usize| match n % 2 {
        0 => Vec::new(),
        _ => b"GET /livez HTTP/1.1\r\nX-A: ".to_vec(),
    };
    let mut crowd = crowd(From::Many(200), target.health, 2 * SOME, says).await;
    trickle(&mut crowd, 8).await;
    Ok(format!("{} connected, {} open after 8 s", crowd.len(), open(&crowd)))
}

async fn socket(target: Target, _: usize) -> anyhow::Result<String> {
    let connect = |_| timeout(Duration::from_secs(3), UnixStream::connect(&target.socket));
    let crowd: Vec<_> = join_all((0..500).map(connect)).await.into_iter().flatten().flatten().collect();
    sleep(HELD).await;
    Ok(format!("{} connected", crowd.len()))
}

async fn hello_begun(target: Target, most: usize) -> anyhow::Result<String> {
    hold(crowd(From::Many(200), target.admin, most, |_| vec![0x16, 0x03, 0x01]).await).await
}

async fn hello_alone(target: Target, most: usize) -> anyhow::Result<String> {
    let hello = target.authority.as_ref().context("no TLS")?.hello()?;
    hold(crowd(From::Many(200), target.admin, most / 4, |_| hello.clone()).await).await
}

async fn plain(target: Target, _: usize) -> anyhow::Result<String> {
    let says = |_| b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    let mut crowd = crowd(From::Many(200), target.admin, SOME, says).await;
    for stream in &mut crowd {
        let mut answer = Vec::new();
        let _ = timeout(HELD, stream.read_to_end(&mut answer)).await;
        ensure!(!answer.starts_with(b"HTTP/1.1 2"), "plain HTTP was served on the TLS port");
    }
    Ok(format!("{} turned away", crowd.len()))
}

async fn idle_sessions(target: Target, _: usize) -> anyhow::Result<String> {
    sessions(&target, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()).await
}

async fn unread_sessions(target: Target, _: usize) -> anyhow::Result<String> {
    sessions(&target, target.request("GET", "/openapi.json", "", "").repeat(40)).await
}

async fn sessions(target: &Target, says: Vec<u8>) -> anyhow::Result<String> {
    let authority = target.authority.as_ref().context("no TLS")?;
    let mut held = Vec::new();
    for begin in (0..600).step_by(50) {
        let some = (begin..begin + 50).map(|n| authority.sent(target.admin, n, says.clone()));
        held.extend(join_all(some).await.into_iter().flatten());
    }
    sleep(HELD).await;
    Ok(format!("{} sessions", held.len()))
}
