'use strict'
// How the run differs from another one. The other one is the first of each pair of numbers.

class Against extends Report {
  constructor(data, buffer) { super(data, buffer, ratioColours) }

  get marked() { return this.data.atStep === null ? undefined : this.data.at }

  tensor(row) {
    const [kind, name, op] = this.data.tensors[row]
    return { name: `${this.data.kinds[kind]} ${name}`, op }
  }

  // The numbers of both runs, as a curve has them.
  pair(row) { return this.data.numbers + row * 2 * this.columns * 4 }

  meaning(code, row, column) {
    const { alone, infinite } = this.data.codes
    if (code === 0) return 'not compared'
    if (code === alone) return 'one run alone has it'
    const [left, right] = new Float32Array(this.buffer, this.pair(row), 2 * this.columns).filter((_, place) => place % this.columns === column)
    const [other, run] = this.data.labels
    return `${this.tensor(row).op} ${number(left)} in ${other}, ${number(right)} in ${run}${code === infinite ? '' : ': ' + ratio(left, right)}`
  }

  show() {
    const { title, says, lines, kinds, tensors, places, loss } = this.data
    $('against').hidden = false
    $('against-title').textContent = title
    $('against-says').textContent = says
    for (const [what, line] of lines) element('li', $('against-lines'), `${what}: ${line}`)
    this.places()
    $('against-loss').hidden = loss === null
    if (loss !== null) this.draw($('against-loss'), loss, {})
    if (places.length) this.pick(places[0])
    if (!tensors.length) return
    this.map = new HeatMap($('against-map'), 'Ratios of tensors by steps', this.colours,
      (row, column, code) => { $('against-tip').textContent = `${this.name(row)}, step ${this.stepName(column)}: ${this.meaning(code, this.rows[row], column)}` },
      row => this.compare(this.rows[row], {}))
    for (const [place, name] of ['all kinds', ...kinds].entries()) $('against-kind').add(new Option(name, String(place - 1)))
    $('against-kind').addEventListener('change', () => this.kindOf(Number($('against-kind').value)))
    this.kindOf(-1)
    this.legend()
    drawn.push({ draw: () => { this.map.colours = this.colours = ratioColours(this.data.codes); this.map.draw(); this.legend() } })
    tableBehind($('against'), 'Table', ['tensor', 'furthest at', 'numbers'], tensors.length, row => {
      const cells = this.cells(this.data.cells + row * this.columns, this.columns), at = cells.indexOf(cells.reduce((a, b) => Math.max(a, b)))
      return { cells: [this.tensor(row).name, this.stepName(at), this.meaning(cells[at], row, at)] }
    })
    if (!places.length) this.compare(this.furthest(), {})
  }

  name(row) { return this.tensor(this.rows[row]).name }

  kindOf(kind) {
    this.rows = this.data.tensors.flatMap(([of], row) => (kind < 0 || of === kind ? [row] : []))
    const cells = new Uint8Array(this.rows.length * this.columns)
    this.rows.forEach((row, place) => cells.set(this.cells(this.data.cells + row * this.columns, this.columns), place * this.columns))
    this.map.show({ cells, rows: this.rows.length, columns: this.columns, rowName: row => this.name(row), columnName: column => this.stepName(column), ticks: count => this.ticks(count) })
  }

  places() {
    const { places, differing } = this.data
    if (!places.length) return element('p', $('against-places'), 'There are none.', 'quiet')
    const heads = ['first step', 'rank', 'tensor', 'what', 'times rounding', 'relative difference']
    fillTable(element('div', $('against-places'), undefined, 'scrolls'), heads, places.length, place => {
      const { step, rank, kind, tensor, what, times_rounding: times, relative } = places[place]
      return { cells: [step, rank, this.button(places[place], `${kind} ${tensor}`), what, times, relative] }
    })
    if (differing > places.length) element('p', $('against-places'), `${differing - places.length} more differ.`, 'quiet')
  }

  button(place, text) {
    return cell => {
      const made = element('button', cell, text, 'link')
      made.type = 'button'
      made.addEventListener('click', () => this.pick(place))
    }
  }

  pick({ row, lines, op, at, kind, tensor }) {
    if (lines !== null) this.compare(row, { at, lines, op, name: `${kind} ${tensor}` })
    else if (row !== null) this.compare(row, { at })
    else {
      this.clear($('against-apart'))
      this.clear($('against-curve'))
      element('p', $('against-curve'), `Only one run has ${kind} ${tensor}, or the page has no room for its curves.`)
    }
  }

  // The row that is furthest apart anywhere.
  furthest() {
    const cells = this.cells(this.data.cells, this.data.tensors.length * this.columns)
    return Math.floor(cells.indexOf(cells.reduce((a, b) => (b > a && b < this.data.codes.alone ? b : a))) / this.columns)
  }

  // Both curves of a tensor, and how far they are apart.
  compare(row, place) {
    const { at = this.marked, lines = this.pair(row), name = this.tensor(row).name } = place, numbers = new Float32Array(this.buffer, lines, 2 * this.columns)
    const apart = Float32Array.from({ length: this.columns }, (_, column) => relative(numbers[column], numbers[this.columns + column]))
    this.draw($('against-curve'), row, place)
    this.clear($('against-apart'))
    if (!apart.some(one => one > 0)) return element('p', $('against-apart'), `${name} is the same in both runs.`, 'quiet')
    drawn.push(new Curve($('against-apart'), `${name}: relative difference`, this.data.first, [{ label: 'relative difference', values: apart }], {
      height: 200, heading: `${name}: relative difference`, at: this.data.first[at], stepName: place => this.stepName(place), isOdd: () => false, logarithmic: true,
    }))
  }

  draw(parent, row, { at = this.marked, lines = this.pair(row), op = this.tensor(row).op, name = this.tensor(row).name }) {
    this.clear(parent)
    const together = row !== null, codes = together ? this.data.cells + row * this.columns : null
    this.curve(parent, { labels: this.data.labels, lines, codes, together, band: false, at }, `${name}: ${op} by step`, 200, true)
  }

  legend() {
    const { least, alone, infinite, same } = this.data.codes, levels = Array.from({ length: alone - least >> 1 }, (_, level) => least + 2 * level)
    $('against-legend').replaceChildren()
    const add = (codes, width, text) => sample($('against-legend'), this.colours, codes, width, text)
    add([...levels.map(code => code + 1).reverse(), ...levels], 200, `half or less … the same, to ${number(Number((100 * (2 ** same - 1)).toPrecision(2)))} % … double or more, by a logarithmic scale`)
    add([infinite], 14, 'NaN or infinite')
    add([alone], 14, 'one run alone has it')
    add([0], 14, 'not compared')
  }
}

const relative = (left, right) => left === right ? 0 : Math.abs(right / left - 1)

function ratio(left, right) {
  const share = right / left - 1
  if (left === right) return 'the same'
  if (!Number.isFinite(share) || share < -0.9 || share > 9) return `${number(right / left)} times`
  return `${number(Math.abs(share) * 100)} % ${share > 0 ? 'larger' : 'smaller'}`
}
