// A form for the parameters of a policy, made from their JSON schema. What no field can show is edited as JSON.

import { field } from './dialog.js';
import { button, el } from './dom.js';

/** The type of a value besides null; undefined where there are several, which only JSON can tell apart. */
function typeOf(schema) {
  const types = [schema.type].flat().filter((type) => type && type !== 'null');
  return types.length === 1 ? types[0] : undefined;
}
/** A text that a field of one line reads back as it was written. */
const isPlain = (value) => typeof value === 'string' && value !== '' && value === value.trim() && !/[\r\n]/.test(value);
const show = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

/** An error with the title and detail of an API problem. */
const inputError = (title, detail, parameter) => Object.assign(new Error(detail), { title, detail, parameter });

/**
 * The field of one parameter: its control, and how its value is read and written. `takes(value)` is whether the field shows
 * the value and reads it back unchanged. `read` returns undefined for an empty field, which is left out of the parameters.
 */
function fieldOf(name, schema) {
  const id = `p-${name}`;
  const byDefault = schema.default === undefined ? '' : `default: ${show(schema.default)}`;
  const choices = schema.enum ?? (typeOf(schema) === 'boolean' ? [true, false] : undefined);
  if (choices) {
    const control = el('select', { id }, el('option', { value: '' }, byDefault || 'not set'), choices.map((value) => el('option', { value: JSON.stringify(value) }, show(value))));
    return { control, takes: (value) => choices.some((choice) => JSON.stringify(choice) === JSON.stringify(value)), read: () => (control.value ? JSON.parse(control.value) : undefined), write: (value) => { control.value = value === undefined ? '' : JSON.stringify(value); } };
  }
  if (['integer', 'number'].includes(typeOf(schema))) {
    const control = el('input', { id, type: 'number', min: schema.minimum, max: schema.maximum, step: typeOf(schema) === 'integer' ? 1 : 'any', placeholder: byDefault });
    return { control, takes: typeOf(schema) === 'integer' ? Number.isInteger : Number.isFinite, read: () => (control.value === '' ? undefined : Number(control.value)), write: (value) => { control.value = value ?? ''; } };
  }
  if (typeOf(schema) === 'string') {
    const control = el('input', { id, type: 'text', placeholder: byDefault, autocomplete: 'off', spellcheck: 'false' });
    return { control, takes: isPlain, read: () => control.value.trim() || undefined, write: (value) => { control.value = value ?? ''; } };
  }
  const items = typeOf(schema) === 'array' && typeOf(schema.items ?? {});
  if (['string', 'integer'].includes(items)) {
    const control = el('input', { id, type: 'text', placeholder: byDefault, autocomplete: 'off', spellcheck: 'false' });
    return {
      control, help: 'Separated by commas.',
      takes: (value) => Array.isArray(value) && value.length > 0 && value.every(items === 'integer' ? Number.isInteger : (item) => isPlain(item) && !item.includes(',')),
      read: () => {
        const parts = control.value.split(',').map((part) => part.trim()).filter(Boolean);
        return parts.length ? parts.map((part) => (items === 'integer' ? Number(part) : part)) : undefined;
      },
      write: (value) => { control.value = (value ?? []).join(', '); },
    };
  }
  const control = el('textarea', { id, rows: 3, spellcheck: 'false', placeholder: byDefault });
  return {
    control, help: 'As JSON.', takes: () => true,
    read: () => {
      if (control.value.trim() === '') return undefined;
      try {
        return JSON.parse(control.value);
      } catch (error) {
        throw inputError(`${name} is not JSON`, error.message, name);
      }
    },
    write: (value) => { control.value = value === undefined ? '' : JSON.stringify(value, null, 1); },
  };
}

export class SchemaForm {
  #fields = new Map();
  #json = el('textarea', { id: 'parameters', rows: 8, spellcheck: 'false', autocapitalize: 'off' });
  #box = el('div', {});
  #asJson;

  constructor(schema, value) {
    for (const [name, of] of Object.entries(schema?.properties ?? {})) this.#fields.set(name, { schema: of, ...fieldOf(name, of) });
    // A parameter that no field can show, or one of a wrong type, must not be lost.
    this.#asJson = this.#fields.size === 0 || !this.#takes(value);
    this.#write(value);
    this.root = el('fieldset', {}, el('legend', {}, 'Parameters'), this.#box);
    this.#draw();
  }

  /** The parameters, as they are written now. */
  value() {
    if (!this.#asJson) {
      const made = {};
      for (const [name, one] of this.#fields) {
        if (!one.control.checkValidity()) throw inputError(`${name} cannot be used`, one.control.validationMessage, name);
        const value = one.read();
        if (value !== undefined) made[name] = value;
      }
      return made;
    }
    let made;
    try {
      made = JSON.parse(this.#json.value.trim() || '{}');
    } catch (error) {
      throw inputError('The parameters are not a JSON object', error.message);
    }
    if (made === null || typeof made !== 'object' || Array.isArray(made)) throw inputError('The parameters are not a JSON object', 'an object such as {"replicas": 4} is needed');
    return made;
  }

  /** The field of the parameter that a problem is about; undefined if it names none. */
  fieldOf({ parameter, status, detail = '' }) {
    const named = detail.match(/\bparameters\.([^\s:[,]+)/)?.[1];
    const name = parameter ?? (this.#fields.has(named) ? named : undefined);
    // A problem without a status is of what was entered, not of a request.
    if (this.#asJson) return status === undefined || detail.includes('parameters') ? this.#json.closest('.field') : undefined;
    const found = this.#fields.get(name)?.control.closest('.field');
    found?.closest('details')?.setAttribute('open', '');
    return found;
  }

  /** Whether the fields can show these parameters. */
  #takes(value) { return Object.entries(value).every(([name, one]) => this.#fields.get(name)?.takes(one)); }

  #write(value) {
    if (this.#asJson) this.#json.value = JSON.stringify(value, null, 2);
    else for (const [name, one] of this.#fields) one.write(value[name]);
  }

  /**
   * The fields. Those with a value are shown, and the others folded under "More". If none has a value, only fields for JSON
   * are folded.
   */
  #asForm() {
    const fields = [...this.#fields];
    const isSet = ([, { control }]) => control.value !== '';
    const rare = fields.filter((one) => !isSet(one) && (fields.some(isSet) || one[1].control.matches('textarea')));
    const made = (list) => el('div', { class: 'pair parameters' }, list.map(([name, { control, schema, help }]) => field(name, control, [schema.description, help].filter(Boolean).join(' '))));
    return [made(fields.filter((one) => !rare.includes(one))), rare.length > 0 && el('details', {}, el('summary', {}, `More: ${rare.map(([name]) => name).join(', ')}`), made(rare))];
  }

  #draw() {
    const other = this.#fields.size > 0 && button(this.#asJson ? 'Edit as a form' : 'Edit as JSON', () => this.#turn(), { kind: 'small' });
    this.#box.replaceChildren(...[...(this.#asJson ? [field('Parameters (JSON)', this.#json, 'The policy’s schema lists them.')]
      : this.#asForm()), other].flat().filter(Boolean));
  }

  #turn() {
    let value;
    try {
      value = this.value();
    } catch {
      // It stays as it is until it can be read.
      return;
    }
    if (this.#asJson && !this.#takes(value)) return;
    this.#asJson = !this.#asJson;
    this.#write(value);
    this.#draw();
    this.#box.querySelector('input, select, textarea')?.focus();
  }
}
