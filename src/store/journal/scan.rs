//! Reading the journal: a file at a time, newest first.

use super::entry::Entry;
use super::frame::{Frame, Head, frames};
use super::segments::{SEGMENT_BYTES, SEGMENT_READ_MAX, Segment};
use super::{FileJournal, hex, seq};
use berth_kernel::decision::{Decision, Filter};
use berth_kernel::ports::{Input, JournalError, Visit};
use std::collections::HashMap;
use std::io;

/// What one look goes through, bytes: some tens of milliseconds.
const LOOK_BYTES: u64 = 4 * SEGMENT_BYTES;
/// The same in files: each start begins one.
const LOOK_FILES: usize = 64;

impl FileJournal {
    /// Hands those that the filter wants to `visit`, newest first, until it takes no more. Answers the
    /// number before which to go on.
    pub(super) fn scan(
        &self,
        filter: &Filter,
        inputs: bool,
        visit: &mut Visit<'_>,
    ) -> Result<Option<u64>, JournalError> {
        let (segments, next) = self.look(filter.before, LOOK_FILES)?;
        for segment in segments {
            let bytes = self.read(&segment)?;
            let all: Vec<_> = frames(&bytes).filter_map(|frame| Some((seq(&frame)?, frame))).collect();
            let nodes = if inputs { nodes(&bytes) } else { HashMap::new() };
            // Clocks may be set back, but what a whole file is too old for is not worth more looks.
            let since = filter.since_wall_ms.unwrap_or(0);
            let old = |frame: &Frame<'_>| matches!(frame.head, Head::Decision { at_wall_ms, .. } if at_wall_ms < since);
            let too_old = !all.is_empty() && all.iter().all(|(_, frame)| old(frame));
            for (seq, frame) in all.into_iter().rev() {
                if filter.before.is_some_and(|before| seq >= before) {
                    continue;
                }
                // One that this release cannot read, of a later one perhaps, hides no other.
                let Ok((decision, input)) = self.decision(&frame, seq, &nodes) else {
                    tracing::debug!(seq, "a decision cannot be read");
                    continue;
                };
                if filter.wants(&decision) && !visit(decision, input) {
                    return Ok(Some(seq + 1));
                }
            }
            if too_old {
                return Ok(None);
            }
        }
        Ok(next)
    }

    /// The one of this number, with what the policies were shown.
    pub(super) fn one(&self, wanted: u64) -> Result<Option<(Decision, Option<Input>)>, JournalError> {
        let (segments, _) = self.look(wanted.checked_add(1), 1)?;
        let Some(segment) = segments.first() else { return Ok(None) };
        let bytes = self.read(segment)?;
        let Some(frame) = frames(&bytes).find(|frame| seq(frame) == Some(wanted)) else {
            return Ok(None);
        };
        self.decision(&frame, wanted, &nodes(&bytes)).map(Some)
    }

    /// Its input is there where its node is among these.
    fn decision(
        &self,
        frame: &Frame<'_>,
        seq: u64,
        nodes: &HashMap<String, Frame<'_>>,
    ) -> Result<(Decision, Option<Input>), JournalError> {
        let body = frame.body().map_err(|e| self.damaged(seq, e))?;
        let mut entry: Entry = serde_json::from_slice(&body).map_err(|e| self.damaged(seq, e))?;
        let question = entry.question.take();
        let decision = entry.decision().map_err(|e| self.damaged(seq, e))?;
        let node = decision.input.as_ref().and_then(|digest| nodes.get(digest.as_str()));
        let input = match (node, question) {
            (Some(node), Some(question)) => Some(Input {
                node: node.body().map_err(|e| self.damaged(seq, e))?,
                question: question.get().as_bytes().to_vec(),
            }),
            _ => None,
        };
        Ok((decision, input))
    }

    /// The newest files in which a number below `before` may be, and the number before which to go on.
    fn look(&self, before: Option<u64>, most: usize) -> Result<(Vec<Segment>, Option<u64>), JournalError> {
        let mut state = self.change();
        self.write(&mut state)?;
        let older = |segment: &&Segment| before.is_none_or(|before| segment.first < before);
        let mut found: Vec<Segment> = state.segments.all.iter().rev().filter(older).cloned().collect();
        let mut bytes = 0;
        let enough = found.iter().position(|segment| {
            bytes += segment.bytes;
            bytes > LOOK_BYTES
        });
        let most = most.min(enough.map_or(usize::MAX, |at| at.max(1)));
        let more = found.len() > most;
        found.truncate(most);
        let next = found.last().filter(|_| more).map(|last| last.first);
        Ok((found, next))
    }

    /// When the first decision in a file was.
    pub(super) fn begins(&self, segment: &Segment) -> Option<u64> {
        let bytes = self.read(segment).ok()?;
        frames(&bytes).find_map(|frame| match frame.head {
            Head::Decision { at_wall_ms, .. } => Some(at_wall_ms),
            Head::Node { .. } => None,
        })
    }

    /// A file that was pruned meanwhile is empty.
    pub(super) fn read(&self, segment: &Segment) -> Result<Vec<u8>, JournalError> {
        match berth_files::read(&segment.path, SEGMENT_READ_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|e| self.trouble("cannot be read", e)),
        }
    }

    fn damaged(&self, seq: u64, error: impl std::fmt::Display) -> JournalError {
        let what =
            format!("decision {seq} is damaged ({error}); the folder may be deleted while berth is stopped");
        JournalError { path: self.folder.display().to_string(), what, source: None }
    }
}

/// By digest.
fn nodes(bytes: &[u8]) -> HashMap<String, Frame<'_>> {
    frames(bytes)
        .filter_map(|frame| match frame.head {
            Head::Node { digest } => Some((hex(&digest), frame)),
            Head::Decision { .. } => None,
        })
        .collect()
}
